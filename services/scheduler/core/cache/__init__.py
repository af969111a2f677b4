"""The paged KV cache: the tree of cached prefixes, free blocks, and what outsiders are told of them."""
