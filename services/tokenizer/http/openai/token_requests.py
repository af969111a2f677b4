"""Reads the bodies of `/tokenize` and `/detokenize`, which are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from pydantic import model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.field_names import FieldNames
from services.tokenizer.http.fields.fields import Count, Fields, Several, read_fields, read_request
from services.tokenizer.http.openai.chat_request import read_chat_request
from services.tokenizer.http.refusals import FieldNaming, invalid_field
from services.tokenizer.json.json_values import JsonObject


class TokenizeFields(Fields):
    """The body of a text to encode."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.prompt is None:
            raise invalid_field("prompt", "needs a text, unless there are messages")
        return self


class DetokenizeFields(Fields):
    """The body of ids to decode."""

    model: str | None = None
    tokens: Several[Count]


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """What to decode."""

    token_ids: bytes
    """Ids of 4 bytes each, in this machine's order."""
    model: str | None
    """The model's name as the client gave it; None if it did not."""


class _StringsField(Fields):
    return_token_strs: bool | None = None


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """What to encode."""

    prompt: tokenizer_pb2.Prompt
    names: FieldNaming
    model: str | None
    """The model's name as the client gave it; None if it did not."""
    has_strings: bool
    """Whether the tokens' texts are wanted."""
    add_special_tokens: bool = True
    """Whether a text gets the post-processor's tokens."""


def read_tokenize_request(value: JsonObject, *, is_lenient: bool = False) -> EncodingRequest:
    """Read a request; `is_lenient` as for `read_request`.

    Raises:
        HttpError: names the first field that is wrong, unknown, or cannot be honoured.
    """
    if value.get("messages") is not None:
        has_strings = bool(read_fields(_StringsField, value).return_token_strs)
        chat = {name: given for name, given in value.items() if name not in _StringsField.model_fields}
        api = read_chat_request(chat, "", is_lenient=is_lenient)
        return EncodingRequest(tokenizer_pb2.Prompt(chat=api.message.chat), api.names, api.model, has_strings)
    fields, _ = read_request(TokenizeFields, value, is_lenient=is_lenient)
    names = FieldNames(is_chat=False, given={})
    prompt = tokenizer_pb2.Prompt(text=fields.prompt)
    has_special_tokens = fields.add_special_tokens is not False
    return EncodingRequest(prompt, names, fields.model, bool(fields.return_token_strs), has_special_tokens)


def read_detokenize_request(value: JsonObject, *, is_lenient: bool = False) -> DetokenizeRequest:
    """Read a request; raises as `read_tokenize_request`."""
    fields, _ = read_request(DetokenizeFields, value, is_lenient=is_lenient)
    return DetokenizeRequest(np.array(fields.tokens, np.uint32).tobytes(), fields.model)
