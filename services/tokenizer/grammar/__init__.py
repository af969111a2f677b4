"""Structured output: grammars and JSON schemas, tried out before a worker compiles them."""
