"""Draws a token from one row of logits, in plain numpy: the yardstick for every backend."""
