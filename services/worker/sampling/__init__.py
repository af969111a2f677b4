"""Turns logits into tokens, row by row: penalties, grammars, noise, log-probabilities."""
