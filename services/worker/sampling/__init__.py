"""Turns logits into tokens, row by row."""
