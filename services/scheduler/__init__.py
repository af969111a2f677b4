"""The scheduler service: it decides what every GPU computes next, and tells the tokenizers what came of it."""
