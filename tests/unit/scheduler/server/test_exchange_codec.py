"""How a replica's messages are decoded, and which are refused because no replica sends them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from lockstep.internal.v1 import exchange_pb2, sampling_pb2
from lockstep.v1 import common_pb2
from services.scheduler.cell.events import ChoiceSoFar, Submission
from services.scheduler.core.batch.sequence import Finish, FinishReason, Priority
from services.scheduler.core.results.outputs import Outputs, RequestEnd, RequestStart
from services.scheduler.server.exchange_codec import decode_request, encode_outputs
from shared.errors import InvalidRequestError, NumericError
from shared.ids import RequestHandle, choice_handles
from shared.request.sampling_codec import encode_options
from shared.request.sampling_params import SamplingOptions, SamplingParams
from shared.step.logprobs import Logprobs
from tests.support.scheduler.engine_driver import token_bytes


def decode(**fields: Any) -> Submission:
    """The decoded submission of a submit with these fields."""
    message = exchange_pb2.ExchangeRequest(submits=[exchange_pb2.Submit(**fields)])
    [submission] = decode_request(1, message).submissions
    return submission


def test_a_submit_is_decoded_field_by_field() -> None:
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
        choices_so_far=[exchange_pb2.ChoiceSoFar(token_ids=token_bytes([11, 12]))],
        age=timedelta(seconds=2.5),
        time_left=timedelta(seconds=0.25),
        determinism=common_pb2.DETERMINISM_EXACT,
        num_earlier_resumes=2,
    )
    params = SamplingParams(9, 0.5, 4, 0.25, 2**64 - 1, True, (5,), ((6, 7), (8,)))
    assert submission == Submission(
        RequestHandle(3),
        "r",
        token_bytes([1, 2]),
        params,
        Priority.HIGH,
        b"salt",
        attempt=4,
        choices_so_far=(ChoiceSoFar(token_bytes([11, 12])),),
        age_s=2.5,
        time_left_s=0.25,
        is_exact=True,
        num_earlier_resumes=2,
    )


def test_a_submit_without_the_newer_fields_is_a_new_first_attempt() -> None:
    assert decode(handle=3) == Submission(RequestHandle(3), "", b"", SamplingParams(0, 0.0, top_p=0.0))


@pytest.mark.parametrize(
    ("number", "priority"), [(0, Priority.NORMAL), (1, Priority.HIGH), (2, Priority.NORMAL), (3, Priority.LOW)]
)
def test_priorities_match_those_of_requests(number: int, priority: Priority) -> None:
    assert decode(priority=number).priority is priority


def test_an_unknown_priority_of_a_newer_replica_is_taken_as_normal() -> None:
    assert decode(priority=77).priority is Priority.NORMAL


def test_zero_time_left_is_not_no_deadline() -> None:
    assert decode(time_left=timedelta(0)).time_left_s == 0.0
    assert decode().time_left_s is None


def test_a_negative_age_is_taken_as_zero() -> None:
    assert decode(age=timedelta(seconds=-5)).age_s == 0.0


def test_choices_and_options_match_the_submit() -> None:
    options = SamplingOptions(min_p=0.5, bad_words=((3, 4),), num_logprobs=0)
    so_far = [exchange_pb2.ChoiceSoFar(has_ended=True), exchange_pb2.ChoiceSoFar(token_ids=token_bytes([9]))]
    submission = decode(handle=3, n=2, choices_so_far=so_far, options=encode_options(options))
    assert (submission.n, submission.params.options) == (2, options)
    assert submission.choices_so_far == (ChoiceSoFar(has_ended=True), ChoiceSoFar(token_bytes([9])))
    assert submission.open_choices == [1]


def test_options_that_change_nothing_are_none() -> None:
    assert decode(options=sampling_pb2.SamplingOptions()).params.options is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 9}, "n or the handle is out of range"),
        ({"handle": 2**32 - 2, "n": 3}, "n or the handle is out of range"),
        ({"n": 3, "choices_so_far": [exchange_pb2.ChoiceSoFar()] * 2}, "choices_so_far must be"),
        ({"options": sampling_pb2.SamplingOptions(bad_words=[b"1"])}, "bad_words"),
        ({"options": sampling_pb2.SamplingOptions(logit_biases=b"1234")}, "logit_biases"),
    ],
)
def test_a_message_that_no_replica_sends_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        decode(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": b"12345"},
        {"choices_so_far": [exchange_pb2.ChoiceSoFar(token_ids=b"123")]},
        {"stop_token_ids": b"1"},
        {"stop_token_sequences": [b"1234", b"12"]},
        {"cache_salt": b"x" * 65},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_impossible_length_is_refused_by_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        decode(**fields)


def test_a_torn_column_of_handles_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="abort_handles"):
        decode_request(1, exchange_pb2.ExchangeRequest(abort_handles=b"123"))


def test_stops_and_aborts_are_decoded_with_their_handles() -> None:
    message = exchange_pb2.ExchangeRequest(
        stop_ats=[exchange_pb2.StopAt(handle=4, num_tokens=9)], abort_handles=token_bytes([7, 8])
    )
    decoded = decode_request(2, message)
    assert (decoded.client, decoded.stop_ats, decoded.aborts) == (2, [(4, 9)], [7, 8])


def column(*values: int) -> Any:
    return np.array(values, np.int32)


def test_outputs_of_a_plain_step_have_one_token_per_row_and_no_optional_fields() -> None:
    message = encode_outputs(Outputs(np.array([4, 5], np.uint32), column(0, 7), column(11, 12)))
    assert (message.counts, message.HasField("logprobs"), len(message.prompt_logprobs)) == (
        token_bytes([1, 1]),
        False,
        0,
    )


def test_outputs_carry_the_counts_of_their_rows_and_log_probabilities() -> None:
    logprobs = Logprobs(
        column(1, 2), column(3, 1), column(1, 2), column(12, 13, 14), np.array([-1, -2, -4], np.float32)
    )
    outputs = Outputs(np.array([4, 5], np.uint32), column(0, 7), column(11, 12, 13), counts=column(1, 2))
    outputs.logprobs, outputs.prompt_logprobs = logprobs, [(RequestHandle(9), logprobs)]
    message = encode_outputs(outputs)
    encoded = sampling_pb2.Logprobs(
        indexes=token_bytes([1, 2]),
        ranks=token_bytes([3, 1]),
        counts=token_bytes([1, 2]),
        token_ids=token_bytes([12, 13, 14]),
        values=np.array([-1, -2, -4], "<f4").tobytes(),
    )
    assert (message.counts, message.token_ids) == (token_bytes([1, 2]), token_bytes([11, 12, 13]))
    assert message.logprobs == encoded
    assert list(message.prompt_logprobs) == [exchange_pb2.PromptLogprobs(handle=9, logprobs=encoded)]


def test_outputs_carry_requested_tokens() -> None:
    logprobs = Logprobs(
        column(0, 1), column(3, 1, 6), column(1, 2), column(11, 12, 9), np.ones(3, np.float32), column(0, 1)
    )
    outputs = Outputs(np.array([4], np.uint32), column(0), column(11, 12), counts=column(2))
    outputs.logprobs = logprobs
    message = encode_outputs(outputs).logprobs
    assert (message.ranks, message.requested_counts) == (token_bytes([3, 1, 6]), token_bytes([0, 1]))
    assert (message.counts, message.token_ids) == (token_bytes([1, 2]), token_bytes([11, 12, 9]))


def test_a_start_says_how_long_its_choice_waited_and_was_prefilled() -> None:
    outputs = Outputs(np.array([4], np.uint32), column(0), column(11))
    outputs.starts.append(RequestStart(RequestHandle(4), num_cached_tokens=32, queue_s=0.25, prefill_s=0.5))
    [start] = encode_outputs(outputs, has_timings=True).starts
    expected = exchange_pb2.RequestStart(handle=4, num_cached_tokens=32, queue_time_us=250_000, prefill_time_us=500_000)
    assert start == expected
    # A replica of an older release knows only the first.
    expected.ClearField("prefill_time_us")
    assert list(encode_outputs(outputs).starts) == [expected]


def test_an_end_reports_how_often_its_choice_was_resumed_and_how_long_it_waited() -> None:
    first, second, third = choice_handles(RequestHandle(1), 3)
    ends = [
        RequestEnd(first, 5, Finish(FinishReason.MAX_TOKENS), num_resumes=2, queue_s=0.5),
        RequestEnd(second, error=NumericError(""), num_resumes=1, queue_s=2.0),
        RequestEnd(third, 5, Finish(FinishReason.MAX_TOKENS)),
    ]
    message = encode_outputs(Outputs.only_ends(ends), has_timings=True)
    assert [end.num_resumes for end in message.ends] == [2, 1, 0]
    assert [end.queue_time_us for end in message.ends] == [500_000, 2_000_000, 0]
    assert not any(end.HasField("queue_time_us") for end in encode_outputs(Outputs.only_ends(ends)).ends)
