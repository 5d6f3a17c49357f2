"""The shell: everything that waits, reads a clock, the environment or the network."""

__version__ = "0.1.0"
