"""Measures the worker on a GPU, with random weights, beside what the same device can do at most."""
