"""Vectors by `langchain-openai`, as for any server but OpenAI's: texts are sent, not their tokens."""

from __future__ import annotations

import math
from typing import Any

from langchain_openai import OpenAIEmbeddings


def connect(embedder: Any, **fields: Any) -> OpenAIEmbeddings:
    """The cell's model."""
    # It would make tokens of OpenAI's vocabulary.
    settings = {"base_url": embedder.base_url, "api_key": "none", "check_embedding_ctx_length": False} | fields
    return OpenAIEmbeddings(model=embedder.model, **settings)


def check_documents_and_queries(embedder: Any) -> None:
    """Several documents and one of them alone have the same vectors, of length 1."""
    embeddings = connect(embedder)
    documents = embeddings.embed_documents(["the fox", "the dog"])
    assert [len(vector) for vector in documents] == [64, 64]
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-5) for vector in documents)
    assert embeddings.embed_query("the fox") == documents[0]
    [short] = connect(embedder, dimensions=8).embed_documents(["the fox"])
    assert len(short) == 8


def check_a_query_has_its_prompt(embedder: Any) -> None:
    """The kind of a text is said by a field that OpenAI does not have."""
    plain, query = connect(embedder), connect(embedder, model_kwargs={"extra_body": {"input_type": "query"}})
    assert query.embed_query("the fox") != plain.embed_query("the fox")
