"""Speculative decoding: what proposes drafts, for which sequences, and what their states come to."""
