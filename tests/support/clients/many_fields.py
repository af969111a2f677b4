"""Messages that have many of anything that a message can have many of, at any depth, for every method of client ports.

They are made from the descriptors, so that a new field or method is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from lockstep.v1 import scheduler_pb2, tokenizer_pb2
from shared.network.access import CLIENT_METHODS, HEALTH_METHODS, METHOD_TO_ROLES

Make = Callable[[int], bytes]
"""A message of at most so many bytes."""

_FILES = (tokenizer_pb2, scheduler_pb2, health_pb2, reflection_pb2)
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# Strings that are read as JSON.
_JSON = frozenset({"arguments", "parameters", "template_variables", "json_schema"})
_UNKNOWN = 3000
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: (_FIXED64, 8),
    FieldDescriptor.TYPE_FIXED64: (_FIXED64, 8),
    FieldDescriptor.TYPE_FLOAT: (_FIXED32, 4),
    FieldDescriptor.TYPE_FIXED32: (_FIXED32, 4),
}


def methods() -> dict[str, Descriptor]:
    """The methods that a client port may serve, and what they are called with."""
    pool = descriptor_pool.Default()
    assert _REFLECTION in METHOD_TO_ROLES
    found = {}
    for method in sorted(CLIENT_METHODS | HEALTH_METHODS | {_REFLECTION}):
        service, _, name = method[1:].partition("/")
        found[method] = pool.FindServiceByName(service).methods_by_name[name].input_type
    return found


def many(kind: Descriptor) -> Iterator[tuple[str, Make]]:
    """What a message of a kind can have many of, and what makes such a message."""
    for name, holders, item in _items(kind, ()):
        yield name, partial(_repeated, holders, item)
    for name, holders in _holders(kind, ()):
        for what, item in (("number", _field(_UNKNOWN, 1)), ("text", _field(_UNKNOWN, b""))):
            yield f"{name}: unknown {what}", partial(_repeated, holders, item)


def filled(kind: Descriptor) -> bytes:
    """A message with a small value in each field, one in each list, and the last one of each `oneof`."""
    chosen = {field.containing_oneof.name if field.containing_oneof else field.name: field for field in kind.fields}
    return b"".join(_field(field.number, _value(field), field) for field in chosen.values())


def _items(kind: Descriptor, holders: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """The name of a field, the numbers of those around it, and one of it; what is no list can come often too."""
    for field in kind.fields:
        name = field.full_name
        if field.message_type is None:
            yield name, holders, _field(field.number, _value(field), field)
            if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                yield f"{name}: empty", holders, _field(field.number, b"")
            elif field.is_repeated:
                yield f"{name}: packed", holders, _field(field.number, b"\x01" * 1000)
            continue
        yield f"{name}: empty", holders, _field(field.number, b"")
        yield f"{name}: filled", holders, _field(field.number, filled(field.message_type))
        for inner in field.message_type.fields:
            if inner.is_repeated:
                some = _field(inner.number, _value(inner), inner) * 100
                yield f"{name} with {inner.name}", holders, _field(field.number, some)
        yield from _items(field.message_type, (*holders, field.number))


def _holders(kind: Descriptor, holders: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield kind.full_name, holders
    for field in kind.fields:
        if field.message_type is not None:
            yield from _holders(field.message_type, (*holders, field.number))


def _repeated(holders: tuple[int, ...], item: bytes, num_bytes: int) -> bytes:
    body = item * ((num_bytes - 6 * len(holders)) // len(item))
    for number in reversed(holders):
        body = _field(number, body)
    return body


def _value(field: FieldDescriptor) -> int | bytes:
    if field.message_type is not None:
        return filled(field.message_type)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return b"{}" if field.name in _JSON else b"a"
    return 1


def _field(number: int, value: int | bytes, field: FieldDescriptor | None = None) -> bytes:
    """A field on the wire. Source: https://protobuf.dev/programming-guides/encoding/."""
    if isinstance(value, bytes):
        return _varint(number << 3 | _LENGTH) + _varint(len(value)) + value
    if field is not None and field.type in _FIXED:
        wire_type, num_bytes = _FIXED[field.type]
        return _varint(number << 3 | wire_type) + bytes(num_bytes)
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
