"""The core: pure functions and frozen values that say what a conversation becomes. No I/O, no clock, no environment."""
