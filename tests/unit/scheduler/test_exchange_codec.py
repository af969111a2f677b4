"""What a replica's messages mean, and which of them no replica sends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from services.scheduler.events import Submission
from services.scheduler.exchange_codec import decode_request
from services.scheduler.sequence import Priority
from shared.errors import InvalidRequestError
from shared.limits import SamplingParams
from tests.support.engine_driver import token_bytes


def decode(**fields: Any) -> Submission:
    """What a submit with these fields means."""
    message = exchange_pb2.ExchangeRequest(submits=[exchange_pb2.Submit(**fields)])
    [submission] = decode_request(1, message).submissions
    return submission


def test_a_submit_means_what_it_says() -> None:
    submission = decode(
        handle=3,
        request_id="r",
        prompt_token_ids=token_bytes([1, 2]),
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=token_bytes([5]),
        stop_token_sequences=[token_bytes([6, 7]), token_bytes([8])],
        priority=common_pb2.PRIORITY_HIGH,
        cache_salt=b"salt",
        attempt=4,
        output_token_ids=token_bytes([11, 12]),
        age=timedelta(seconds=2.5),
        time_left=timedelta(seconds=0.25),
    )
    params = SamplingParams(9, 0.5, 4, 0.25, 2**64 - 1, True, (5,), ((6, 7), (8,)))
    assert submission == Submission(
        3,
        "r",
        token_bytes([1, 2]),
        params,
        Priority.HIGH,
        b"salt",
        attempt=4,
        output=token_bytes([11, 12]),
        age_s=2.5,
        time_left_s=0.25,
    )


def test_a_submit_without_the_newer_fields_is_a_first_attempt_that_just_came() -> None:
    assert decode(handle=3) == Submission(3, "", b"", SamplingParams(0, 0.0, top_p=0.0))


@pytest.mark.parametrize(
    ("number", "priority"), [(0, Priority.NORMAL), (1, Priority.HIGH), (2, Priority.NORMAL), (3, Priority.LOW)]
)
def test_priorities_are_those_of_requests(number: int, priority: Priority) -> None:
    assert decode(priority=number).priority is priority


def test_a_priority_of_a_newer_replica_is_taken_as_normal() -> None:
    assert decode(priority=77).priority is Priority.NORMAL


def test_a_time_left_of_nothing_is_not_one_of_for_ever() -> None:
    assert decode(time_left=timedelta(0)).time_left_s == 0.0
    assert decode().time_left_s is None


def test_nobody_is_younger_than_now() -> None:
    assert decode(age=timedelta(seconds=-5)).age_s == 0.0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": b"12345"},
        {"output_token_ids": b"123"},
        {"stop_token_ids": b"1"},
        {"stop_token_sequences": [b"1234", b"12"]},
        {"cache_salt": b"x" * 65},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_length_that_cannot_be_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        decode(**fields)


def test_a_torn_column_of_handles_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="abort_handles"):
        decode_request(1, exchange_pb2.ExchangeRequest(abort_handles=b"123"))


def test_stops_and_aborts_come_with_their_handles() -> None:
    message = exchange_pb2.ExchangeRequest(
        stop_ats=[exchange_pb2.StopAt(handle=4, num_tokens=9)], abort_handles=token_bytes([7, 8])
    )
    decoded = decode_request(2, message)
    assert (decoded.client, decoded.stop_ats, decoded.aborts) == (2, [(4, 9)], [7, 8])
