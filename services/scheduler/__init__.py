"""The scheduler service: it decides what every GPU computes next, and sends the results to the tokenizers."""
