"""From logits to tokens, row by row: penalties, grammars, noise, log-probabilities."""
