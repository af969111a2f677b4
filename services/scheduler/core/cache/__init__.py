"""The paged KV cache: which sequence holds which blocks, and by which prefix they can be found."""
