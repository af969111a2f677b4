"""Structured output: grammars, tried out before a worker compiles them."""
