"""Speculative decoding: what proposes drafts, for whom, and what their states come to."""
