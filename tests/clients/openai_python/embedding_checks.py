"""Embeddings with OpenAI's library for Python, which asks for base64 unless told otherwise."""

from __future__ import annotations

import math
from typing import Any

import openai

from tests.clients.openai_python.asking import connect, error_of


def check_vectors(embedder: Any) -> None:
    """Texts and token ids become vectors of length 1, the same as numbers and as base64."""
    client = connect(embedder)
    texts = ["the fox", "the dog"]
    answer = client.embeddings.create(model=embedder.model, input=texts)
    vectors = [data.embedding for data in answer.data]
    assert [len(vector) for vector in vectors] == [64, 64]
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-5) for vector in vectors)
    numbers = client.embeddings.create(model=embedder.model, input=texts, encoding_format="float")
    assert [data.embedding for data in numbers.data] == vectors
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    assert len(client.embeddings.create(model=embedder.model, input=[[5, 6], [7]]).data) == 2
    asked = client.embeddings.create(model=embedder.model, input=texts, extra_body={"input_type": "query"})
    assert asked.usage.prompt_tokens > answer.usage.prompt_tokens


def check_fewer_dimensions(embedder: Any) -> None:
    """A vector is cut and has length 1 again."""
    [data] = connect(embedder).embeddings.create(model=embedder.model, input="x", dimensions=8).data
    assert len(data.embedding) == 8
    assert math.isclose(math.hypot(*data.embedding), 1, abs_tol=1e-5)


def check_refusals(embedder: Any, cell: Any) -> None:
    """What the model is not served for is a bad request on its name."""
    client, text = connect(embedder), {"model": embedder.model, "messages": [{"role": "user", "content": "x"}]}
    assert error_of(openai.BadRequestError, lambda: client.chat.completions.create(**text)).param == "model"
    other = connect(cell).embeddings
    assert error_of(openai.BadRequestError, lambda: other.create(model=cell.model, input="x")).param == "model"
    error = error_of(openai.BadRequestError, lambda: client.embeddings.create(model=embedder.model, input=["x", ""]))
    assert error.param == "input[1]"
