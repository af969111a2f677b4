"""Steps and results encoded and decoded: whole columns, with all their fields."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from lockstep.internal.v1 import worker_pb2
from services.worker.step import EnteringSequence, Logprobs, StepOutput
from services.worker.step_codec import parse_step, to_result
from shared.errors import StepMismatchError
from shared.limits import SamplingOptions
from tests.support.worker.worker_steps import column, decode_step, make_enter, prefill_step, to_request, unpack

EVERY_OPTION = SamplingOptions(
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias=((3, -2.5), (70, 100.0)),
    bad_words=((4,), (5, 6, 7)),
    min_tokens=3,
    num_logprobs=0,
    num_prompt_logprobs=20,
    grammar="start: /ä+/",
    logprob_token_ids=(9, 3, 9),
)
EVERY_FIELD = replace(
    make_enter(2, [1, 2], [7, 8], num_cached_tokens=4, num_later_tokens=3, temperature=0.5, seed=2**64 - 1),
    choice=7,
    options=EVERY_OPTION,
    stop_token_ids=column([2, 9]),
    cached_token_ids=column([30, 31, 32, 33]),
    max_num_tokens=20,
)


def assert_equal(actual: object, expected: object) -> None:
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected


def there_and_back(enter: EnteringSequence) -> EnteringSequence:
    message = to_request(prefill_step(enter)).SerializeToString()
    return parse_step(worker_pb2.StepRequest.FromString(message)).enters[0]


@pytest.mark.parametrize("enter", [EVERY_FIELD, make_enter(0, [1], [2])], ids=["every field", "none that is rare"])
def test_an_entering_sequence_survives_encoding(enter: EnteringSequence) -> None:
    parsed = there_and_back(enter)
    assert_equal(parsed.chunk.token_ids, enter.chunk.token_ids)
    for field in fields(enter):
        if field.name != "chunk":
            assert_equal(getattr(parsed, field.name), getattr(enter, field.name))


def test_options_that_change_nothing_decode_to_none() -> None:
    request = to_request(prefill_step(make_enter(0, [1], [2])))
    request.enters[0].options.min_p = 0.0
    assert parse_step(request).enters[0].options == SamplingOptions()


@pytest.mark.parametrize("name", ["block_ids", "stop_token_ids", "cached_token_ids"])
def test_a_torn_column_is_refused(name: str) -> None:
    request = to_request(prefill_step(EVERY_FIELD))
    setattr(request.enters[0], name, b"\0" * 7)
    with pytest.raises(StepMismatchError):
        parse_step(request)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias_token_ids", b"\0" * 7),
        ("logit_biases", b"\0" * 7),
        ("logit_biases", b"\0" * 4),
        ("logit_bias_token_ids", b""),
        ("bad_words", [b"\0" * 4, b"\0" * 5]),
    ],
)
def test_options_with_mismatched_columns_are_refused(name: str, value: bytes | list[bytes]) -> None:
    request = to_request(prefill_step(EVERY_FIELD))
    options = request.enters[0].options
    options.ClearField(name)
    if isinstance(value, list):
        options.bad_words.extend(value)
    else:
        setattr(options, name, value)
    with pytest.raises(StepMismatchError):
        parse_step(request)


def test_a_step_carries_the_plan_of_coupled_ranks() -> None:
    coupled = replace(decode_step(), is_dummy=True, num_tokens_across_dp=(7, 1, 4000), graph_batch_size=16)
    for step in (coupled, decode_step()):
        parsed = parse_step(worker_pb2.StepRequest.FromString(to_request(step).SerializeToString()))
        assert parsed.is_dummy is step.is_dummy
        assert parsed.num_tokens_across_dp == step.num_tokens_across_dp
        assert parsed.graph_batch_size == step.graph_batch_size


LOGPROBS = Logprobs(
    indexes=column([0, 2]),
    ranks=column([1, 40]),
    counts=column([2, 1]),
    token_ids=column([5, 6, 7]),
    values=np.array([-0.5, -1.25, -9.0], np.float32),
)
OUTPUT = StepOutput(3, 4, column([5, 6, 7]), column([1]), 250)


RARE = {
    "counts",
    "num_draft_tokens",
    "logprobs",
    "prompt_logprobs",
    "failed_grammar_rows",
    "num_replayed_tokens",
    "num_replay_mismatches",
}


def test_a_plain_result_omits_the_rare_fields() -> None:
    result = to_result(OUTPUT)
    assert (result.epoch, result.step_id, result.device_time_us) == (3, 4, 250)
    assert (unpack(result.token_ids), unpack(result.not_finite_rows)) == ([5, 6, 7], [1])
    assert {field.name for field, _ in result.ListFields()}.isdisjoint(RARE)


def test_a_result_carries_counts_and_log_probabilities() -> None:
    result = to_result(
        replace(
            OUTPUT,
            counts=column([0, 2, 1]),
            num_draft_tokens=9,
            logprobs=LOGPROBS,
            prompt_logprobs=((6, LOGPROBS), (2, replace(LOGPROBS, ranks=column([3, 4])))),
            failed_grammar_rows=column([2]),
            num_replayed_tokens=64,
            num_replay_mismatches=3,
        )
    )
    assert (result.num_replayed_tokens, result.num_replay_mismatches) == (64, 3)
    assert unpack(result.failed_grammar_rows) == [2]
    assert (unpack(result.counts), result.num_draft_tokens) == ([0, 2, 1], 9)
    assert [chunk.slot for chunk in result.prompt_logprobs] == [6, 2]
    for message in (result.logprobs, result.prompt_logprobs[0].logprobs):
        for name in ("indexes", "ranks", "counts", "token_ids"):
            assert unpack(getattr(message, name)) == getattr(LOGPROBS, name).tolist()
        assert np.frombuffer(message.values, "<f4").tolist() == [-0.5, -1.25, -9.0]
        assert not message.requested_counts
    assert unpack(result.prompt_logprobs[1].logprobs.ranks) == [3, 4]


def test_a_result_carries_requested_tokens() -> None:
    logprobs = replace(LOGPROBS, ranks=column([1, 8, 40]), requested_counts=column([1, 0]))
    message = to_result(replace(OUTPUT, logprobs=logprobs)).logprobs
    assert (unpack(message.ranks), unpack(message.requested_counts)) == ([1, 8, 40], [1, 0])


def test_counts_of_one_may_be_sent() -> None:
    assert to_result(replace(OUTPUT, counts=column())).HasField("counts")
