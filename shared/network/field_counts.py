"""Counts the fields of a message before it is parsed.

A field of two bytes takes up to a hundred bytes parsed, and is parsed by code that lets nothing else run meanwhile.
Counting takes as long as the bound allows, whatever a message has, and lets other threads run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from shared.errors import InvalidRequestError, Violation

MAX_FIELDS = 64 * 1024
"""The most fields of a message, at all depths. Packed numbers are one; elements of other lists, and entries of maps,
are one each."""

# Wire types; those of groups, which proto3 does not have, are not here.
# Source: https://protobuf.dev/programming-guides/encoding/
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_NUM_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# The largest number of one byte.
_MAX_BYTE = 0x7F
# What wraps a request; errors name the fields of what it wraps.
_WRAPPER = "request."


class _Inner(NamedTuple):
    """A field with messages, and the fields with messages of those, by their tags."""

    field: FieldDescriptor
    tags: Mapping[int, _Inner]


def check_num_fields(data: bytes, kind: Descriptor, most: int = MAX_FIELDS) -> None:
    """Refuse a message with too many fields, known ones or not.

    Args:
        data: The message.
        kind: What it is to be parsed as.
        most: How many fields it may have.

    Raises:
        InvalidRequestError: it has more; names the field in which that was found.
        ValueError: it cannot be parsed. What cannot be parsed otherwise, such as text that is not UTF-8, passes.
    """
    try:
        _walk(data, kind, most)
    except IndexError:
        raise ValueError("truncated") from None


def _walk(data: bytes, kind: Descriptor, most: int) -> None:
    position, end, tags = 0, len(data), _inner_fields(kind)
    # The messages around the one that is walked through, and the fields that hold these.
    unfinished, path = list[tuple[int, Mapping[int, _Inner]]](), list[FieldDescriptor]()
    num_fields = 0
    while position < end or unfinished:
        if position == end:
            end, tags = unfinished.pop()
            path.pop()
            continue
        tag = data[position]
        position += 1
        if tag > _MAX_BYTE:
            tag, position = _read_varint(data, position - 1)
        num_fields += 1
        if num_fields > most:
            raise _too_many(kind, path, tag >> 3, most)
        if tag & 7 == _LENGTH:
            size = data[position]
            position += 1
            if size > _MAX_BYTE:
                size, position = _read_varint(data, position - 1)
            after = position + size
        else:
            after = _skip(data, position, tag & 7)
        if after > end:
            raise ValueError("truncated")
        if (inner := tags.get(tag)) is None:
            position = after
        else:
            unfinished.append((end, tags))
            path.append(inner.field)
            end, tags = after, inner.tags


def _skip(data: bytes, position: int, wire_type: int) -> int:
    """Where a number at `position` ends."""
    if wire_type == _VARINT:
        return position + 1 if data[position] <= _MAX_BYTE else _read_varint(data, position)[1]
    if wire_type not in _NUM_FIXED_BYTES:
        raise ValueError("an unknown wire type")
    return position + _NUM_FIXED_BYTES[wire_type]


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[position + index]
        value |= (byte & _MAX_BYTE) << (7 * index)
        if byte <= _MAX_BYTE:
            return value, position + index + 1
    raise ValueError("a number of more than 64 bits")


def _too_many(kind: Descriptor, path: list[FieldDescriptor], number: int, most: int) -> InvalidRequestError:
    inner = path[-1].message_type if path else kind
    last = None if inner is None else inner.fields_by_number.get(number)
    fields = path if last is None else [*path, last]
    # The list that has too many, not what the last one of it has.
    places = [place for place, field in enumerate(fields, 1) if field.is_repeated]
    name = ".".join(field.name for field in fields[: places[-1] if places else None]) or "message"
    description = (
        f"a message must have at most {most} fields, those of messages inside of it, and each element of a list but of "
        "packed numbers, included"
    )
    return InvalidRequestError.from_violations([Violation(name.removeprefix(_WRAPPER), "OUT_OF_RANGE", description)])


@functools.cache
def _inner_fields(kind: Descriptor) -> Mapping[int, _Inner]:
    """The fields of a message that have messages."""
    return {
        field.number << 3 | _LENGTH: _Inner(field, _inner_fields(field.message_type))
        for field in kind.fields
        if field.message_type is not None
    }
