"""The fields of a message are counted before it is parsed."""

from __future__ import annotations

import random
from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.v1 import common_pb2, tokenizer_pb2
from shared.errors import InvalidRequestError
from shared.network.field_counts import MAX_FIELDS, check_num_fields
from tests.support.clients.many_fields import filled, methods

KINDS = sorted(methods().values(), key=lambda kind: kind.full_name)
UNKNOWN = b"\xc2\xbb\x01\x03abc" + b"\xc0\xbb\x01\x81\x01" + b"\xc1\xbb\x01" + bytes(8) + b"\xc5\xbb\x01" + bytes(4)


def build(kind: Descriptor, draw: random.Random) -> Message:
    """A message with some of everything that it may have, and lengths of one byte and of two."""
    message = GetMessageClass(kind).FromString(filled(kind) * draw.choice((0, 1, 2, 200)))
    for field in kind.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for _ in range(draw.randint(0, 2)):
            inner = getattr(message, field.name)
            (inner.add() if field.is_repeated else inner).MergeFrom(build(field.message_type, draw))
    return message


def count(message: Message) -> int:
    """The fields of a message as it is serialized."""
    num_fields = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            # An entry, its key and its value.
            num_fields += 3 * len(value)
        elif field.message_type is not None:
            num_fields += sum(1 + count(each) for each in (value if field.is_repeated else [value]))
        else:
            num_fields += len(value) if field.is_repeated and not field.is_packed else 1
    return num_fields


def check_counts(kind: Descriptor, seed: int) -> None:
    message = build(kind, random.Random(seed))
    data, num_fields = message.SerializeToString(), count(message)
    check_num_fields(data + UNKNOWN, kind, num_fields + 4)
    if num_fields:
        with pytest.raises(InvalidRequestError, match=f"must have at most {num_fields - 1} fields"):
            check_num_fields(data, kind, num_fields - 1)


def check_refusals(kind: Descriptor, seed: int, data: bytes) -> None:
    """What is refused as broken, parsing refuses too; but for groups, which proto3 does not have."""
    draw = random.Random(seed)
    valid = bytearray(build(kind, draw).SerializeToString()[:300] + UNKNOWN + data)
    for _ in range(draw.randint(0, 3)):
        valid[draw.randrange(len(valid))] = draw.randrange(256)
    broken = bytes(valid[: draw.randint(0, len(valid))])
    try:
        check_num_fields(broken, kind)
    except ValueError as error:
        if "wire type" not in str(error):
            with pytest.raises(DecodeError):
                GetMessageClass(kind).FromString(broken)


@given(st.sampled_from(KINDS), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_every_field_of_a_message_counts_once(kind: Descriptor, seed: int) -> None:
    check_counts(kind, seed)


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.binary(max_size=40))
@settings(max_examples=50, deadline=None)
def test_what_counting_refuses_as_broken_cannot_be_parsed(kind: Descriptor, seed: int, data: bytes) -> None:
    check_refusals(kind, seed, data)


@pytest.mark.proof
@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.binary(max_size=40))
@settings(max_examples=5000, deadline=None)
def test_counting_agrees_with_parsing(kind: Descriptor, seed: int, data: bytes) -> None:
    check_counts(kind, seed)
    check_refusals(kind, seed, data)


CALL = tokenizer_pb2.ToolCall(name="f")
TOO_MANY: list[tuple[str, Message]] = [
    ("stop", tokenizer_pb2.GenerateRequest(stop=["a"] * (MAX_FIELDS + 1))),
    (
        "chat.messages",
        tokenizer_pb2.GenerateRequest(
            chat=tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER)] * MAX_FIELDS)
        ),
    ),
    (
        "chat.messages.tool_calls",
        tokenizer_pb2.CompleteRequest(
            request=tokenizer_pb2.GenerateRequest(
                chat=tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(tool_calls=[CALL] * MAX_FIELDS)])
            )
        ),
    ),
    (
        "sampling.logit_bias",
        tokenizer_pb2.GenerateRequest(
            sampling=common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MAX_FIELDS), 1.0))
        ),
    ),
]


@pytest.mark.parametrize(("name", "message"), TOO_MANY)
def test_the_list_that_has_too_many_is_named(name: str, message: Message) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_num_fields(message.SerializeToString(), cast(Descriptor, message.DESCRIPTOR))
    [violation] = refused.value.violations
    assert (violation.field, violation.reason) == (name, "OUT_OF_RANGE")


def test_packed_numbers_are_one_field() -> None:
    message = tokenizer_pb2.DetokenizeRequest(token_ids=[12345] * (2 * MAX_FIELDS))
    check_num_fields(message.SerializeToString(), cast(Descriptor, message.DESCRIPTOR))
