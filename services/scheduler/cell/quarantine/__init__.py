"""Runs requests that may have crashed a worker alone until that is known."""
