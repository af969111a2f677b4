"""Requests that may have crashed a worker, run alone until that is known."""
