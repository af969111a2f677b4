"""Speculative decoding: proposers of drafts."""
