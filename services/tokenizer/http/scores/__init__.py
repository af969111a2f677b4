"""Scores and ranks: the bodies of vLLM, SGLang, Jina, Cohere and TEI, which ask for the same."""
