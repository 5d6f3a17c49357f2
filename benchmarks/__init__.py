"""Measurements: ratios of one run, never timed assertions."""
