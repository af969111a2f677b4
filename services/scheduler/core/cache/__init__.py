"""The paged KV cache: which sequence holds which blocks, and which prefix they can be found by."""
