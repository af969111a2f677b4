"""How a request that was read crosses from the process that has read it: as MessagePack.

Objects are of the types that are listed here, each its type's name and its attributes. Only the processes of one
service speak it, and what a client wrote is in no type's name.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from google.protobuf.message import Message

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.embeddings.requests import EmbeddingNames, EmbeddingRequest
from services.tokenizer.http.fields.api_request import AnswerOptions, ApiRequest
from services.tokenizer.http.fields.field_names import FieldNames, MessagesNames, ResponsesNames
from services.tokenizer.http.openai.token_requests import DetokenizeRequest, EncodingRequest
from services.tokenizer.http.openai_responses.request import ResponseOptions
from services.tokenizer.http.openai_responses.tools import ToolKind
from services.tokenizer.http.scores.requests import RatingNames, RatingRequest

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        AnswerOptions,
        ApiRequest,
        DetokenizeRequest,
        EmbeddingNames,
        EmbeddingRequest,
        EncodingRequest,
        FieldNames,
        MessagesNames,
        RatingNames,
        RatingRequest,
        ResponseOptions,
        ResponsesNames,
        ToolKind,
    )
}
_MESSAGES: dict[str, type[Message]] = {
    kind.DESCRIPTOR.name: kind
    for kind in (
        tokenizer_pb2.EmbedRequest,
        tokenizer_pb2.GenerateRequest,
        tokenizer_pb2.Prompt,
        tokenizer_pb2.ScoreRequest,
    )
}
_PLAIN = (bool, int, float, str, bytes, type(None))


def pack(value: object) -> bytes:
    """The bytes of a request that was read."""
    return msgspec.msgpack.encode(_packed(value))


def unpack(data: bytes | bytearray) -> Any:
    """What `pack` was given; tuples are lists."""
    return _unpacked(msgspec.msgpack.decode(data))


def _packed(value: object) -> object:
    """Objects, mappings and messages as lists that begin with what they are; lists as lists that begin with None."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [None, *map(_packed, value)]
    if isinstance(value, dict):
        return ["dict", [_packed(key) for key in value], [_packed(each) for each in value.values()]]
    if isinstance(value, msgspec.Raw):
        return ["Raw", bytes(value)]
    if isinstance(value, Message):
        return [value.DESCRIPTOR.name, value.SerializeToString()]
    name = type(value).__name__
    assert _KINDS.get(name) is type(value), f"{name} does not cross"
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(vars(value))
    return [name, names, [_packed(getattr(value, each)) for each in names]]


def _unpacked(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind is None:
        return [_unpacked(each) for each in rest]
    if kind == "dict":
        return dict(zip(rest[0], map(_unpacked, rest[1]), strict=True))
    if kind == "Raw":
        return msgspec.Raw(rest[0])
    if kind in _MESSAGES:
        return _MESSAGES[kind].FromString(rest[0])
    made: Any = object.__new__(_KINDS[kind])
    for name, each in zip(rest[0], rest[1], strict=True):
        object.__setattr__(made, name, _unpacked(each))
    return made
