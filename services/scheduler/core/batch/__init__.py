"""Sequences, steps, and the columns of a batch."""
