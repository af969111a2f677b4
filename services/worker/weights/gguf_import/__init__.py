"""GGUF files, and what `lockstep import` makes of them."""
