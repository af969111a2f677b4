"""Sequences, steps, and the columns that hold the rows of a batch."""
