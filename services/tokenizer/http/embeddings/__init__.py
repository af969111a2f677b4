"""Vectors of texts, in the body of OpenAI's embeddings."""
