"""Requests that have a given text in one of their text fields each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Bases = Mapping[str, Callable[[], Message]]
"""By a message type's name, what its required fields are; an empty message by default."""


def messages_with_text(descriptor: Any, text: str, bases: Bases) -> Iterator[tuple[str, Message]]:
    """A message for every field of strings or bytes, at any depth, that has `text` there, and the field's path."""
    for field in descriptor.fields:
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            is_text = field.type == FieldDescriptor.TYPE_STRING
            yield field.name, _with(_base(descriptor, bases), field, text if is_text else text.encode())
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for path, value in messages_with_text(field.message_type, text, bases):
                yield f"{field.name}.{path}", _with(_base(descriptor, bases), field, value)


def _base(descriptor: Any, bases: Bases) -> Message:
    return bases[descriptor.name]() if descriptor.name in bases else GetMessageClass(descriptor)()


def _with(message: Message, field: FieldDescriptor, value: Any) -> Message:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    elif field.message_type is not None:
        getattr(message, field.name).MergeFrom(value)
    else:
        setattr(message, field.name, value)
    return message
