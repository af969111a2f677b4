"""Speculative decoding: what proposes draft tokens, and how many."""
