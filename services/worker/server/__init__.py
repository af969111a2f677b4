"""The RPCs that a scheduler calls."""
