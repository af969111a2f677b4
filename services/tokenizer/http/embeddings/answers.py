"""What `POST /v1/embeddings` answers."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.embeddings.requests import EmbeddingRequest
from services.tokenizer.http.streams.answer_facts import usage_value


def embedding_value(asked: EmbeddingRequest, made: tokenizer_pb2.EmbedResponse, model: str) -> dict[str, Any]:
    """OpenAI's answer to a request; `model` is the name that answers have."""
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(embedding, is_base64=asked.is_base64)}
        for index, embedding in enumerate(made.embeddings)
    ]
    # OpenAI's has nothing about a completion, since there is none.
    usage = {name: value for name, value in usage_value(made.usage).items() if not name.startswith("completion")}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _vector(embedding: tokenizer_pb2.Embedding, *, is_base64: bool) -> str | msgspec.Raw:
    """Encoded here, vector by vector, so that a thread that does it lets others go on."""
    if is_base64:
        return base64.b64encode(np.array(embedding.values, "<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(list(embedding.values)))
