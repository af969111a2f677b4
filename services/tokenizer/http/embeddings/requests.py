"""Reads the body of `POST /v1/embeddings`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.fields import Count, Fields, Whole, read_request
from services.tokenizer.http.fields.prompt_parts import PromptPart, Prompts, prompt_message, read_prompts
from services.tokenizer.http.fields.sampling_fields import Seconds, priority_of
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.text_size import MAX_INPUTS

_INPUT_TYPES = {
    "query": tokenizer_pb2.INPUT_TYPE_QUERY,
    "search_query": tokenizer_pb2.INPUT_TYPE_QUERY,
    "document": tokenizer_pb2.INPUT_TYPE_DOCUMENT,
    "passage": tokenizer_pb2.INPUT_TYPE_DOCUMENT,
    "search_document": tokenizer_pb2.INPUT_TYPE_DOCUMENT,
}


class EmbeddingFields(Fields):
    """The body: OpenAI's fields, vLLM's, those that others have for what a text is, and our own."""

    input: Annotated[
        Prompts,
        BeforeValidator(
            partial(read_prompts, most=MAX_INPUTS, what="inputs"), json_schema_input_type=PromptPart | list[PromptPart]
        ),
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: Count | None = None
    input_type: Literal["query", "search_query", "document", "passage", "search_document"] | None = None
    prompt_name: str | None = None
    add_special_tokens: Literal[True] | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    determinism: Literal["ordinary", "exact"] | None = None
    timeout_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingNames:
    """Names the fields of an `EmbedRequest` in the JSON."""

    is_list: bool

    def __call__(self, name: str) -> str:
        """The name in the request's JSON."""
        return re.sub(r"^prompts?(\.prompts(\[\d+\])?.*)?$", r"input\2" if self.is_list else "input", name)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A body, read: what to make vectors of, and how the answer is to look."""

    message: tokenizer_pb2.EmbedRequest
    names: EmbeddingNames
    model: str | None = None
    """The model's name as the client gave it; None if it did not."""
    timeout_s: float | None = None
    ignored: list[str] = field(default_factory=list)
    """Names of fields that have no effect."""
    is_base64: bool = False
    """Whether vectors are float32 in base64, instead of numbers."""


def read_embedding_request(value: JsonObject, request_id: str, *, is_lenient: bool = False) -> EmbeddingRequest:
    """Read a request, which the cell knows by `request_id`; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    fields, ignored = read_request(EmbeddingFields, value, is_lenient=is_lenient)
    message = tokenizer_pb2.EmbedRequest(
        request_id=request_id,
        dimensions=fields.dimensions,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        input_type=None if fields.input_type is None else _INPUT_TYPES[fields.input_type],
        prompt_name=fields.prompt_name,
        priority=priority_of(fields.priority or 0),
        cache_salt=fields.cache_salt,
    )
    if fields.determinism == "exact":
        message.determinism = common_pb2.DETERMINISM_EXACT
    message.prompts.prompts.extend(map(prompt_message, fields.input))
    given = value["input"]
    is_list = isinstance(given, list) and not (given and isinstance(given[0], int | float))
    return EmbeddingRequest(
        message,
        EmbeddingNames(is_list),
        fields.model,
        fields.timeout_s,
        ignored,
        is_base64=fields.encoding_format == "base64",
    )
