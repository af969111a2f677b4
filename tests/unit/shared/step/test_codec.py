"""Steps and results encoded and decoded: whole columns, with all their fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.internal.v1 import sampling_pb2, worker_pb2
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.batch.step import ScheduledBatch, Step
from shared.errors import StepMismatchError
from shared.ids import Slot
from shared.request.sampling_codec import decode_options
from shared.request.sampling_params import Pooling, SamplingOptions, SamplingParams
from shared.step.codec import encode_result, encode_step, parse_result, parse_step
from shared.step.logprobs import Logprobs
from shared.step.step import EnteringSequence, PrefillChunk, StepKind, StepResult
from tests.support.clients.every_option import unset_options
from tests.support.scheduler.engine_driver import EOS, EngineDriver
from tests.support.worker.worker_steps import (
    column,
    decode_step,
    make_enter,
    pack,
    prefill_step,
    split,
    to_request,
    unpack,
)

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
    reasoning_begin=(8,),
    reasoning_end=(9, 10),
    allowed_token_ids=(2, 5),
    logprob_token_ids=(9, 3, 9),
    pooling=Pooling.MEAN,
)
EVERY_FIELD = EnteringSequence(
    PrefillChunk(Slot(2), pack([1, 2]), 3),
    num_cached_tokens=4,
    num_prompt_tokens=9,
    block_bytes=pack([7, 8]),
    params=SamplingParams(11, 0.5, top_k=40, top_p=0.75, seed=2**64 - 1, options=EVERY_OPTION),
    choice=7,
    stop_token_ids=(2, 9),
    cached_token_bytes=pack([30, 31, 32, 33]),
)


def make_dummy(leave_slots: Sequence[int] = ()) -> ScheduledBatch:
    """A batch that computes nothing."""
    no_slots: Slots = np.empty(0, np.int32)
    return ScheduledBatch(
        StepKind.DECODE,
        num_tokens=0,
        row_slots=no_slots,
        decode_slots=no_slots,
        partial_slots=[],
        leave_slots=[Slot(number) for number in leave_slots],
        chunks=[],
        enters=[],
        append_slots=no_slots,
        append_block_ids=[],
        skips_rows=False,
    )


def plan_of(enters: Sequence[EnteringSequence], chunks: Sequence[PrefillChunk]) -> ScheduledBatch:
    """A batch that computes prompts."""
    return replace(make_dummy(), kind=StepKind.PREFILL, num_tokens=1, enters=list(enters), chunks=list(chunks))


def test_no_option_is_left_out_here() -> None:
    assert not unset_options(EVERY_OPTION)


def test_sequences_that_enter_become_columns() -> None:
    enters = [make_enter(5, [3], [9]), EVERY_FIELD, make_enter(1, [4, 5], [])]
    chunks = [PrefillChunk(Slot(7), pack([20, 21, 22]), 1)]
    message = encode_step(Step(1, 7, plan_of(enters, chunks))).SerializeToString()
    parsed = parse_step(worker_pb2.StepRequest.FromString(message))
    parts = [*chunks, *(enter.chunk for enter in enters)]
    assert parsed.chunks.slots.tolist() == [chunk.slot for chunk in parts]
    assert parsed.chunks.num_tokens.tolist() == [chunk.num_tokens for chunk in parts]
    assert parsed.chunks.num_later_tokens.tolist() == [chunk.num_later_tokens for chunk in parts]
    assert parsed.chunks.token_ids.tobytes() == b"".join(chunk.token_bytes for chunk in parts)
    columns = parsed.enters
    assert columns.slots.tolist() == [enter.chunk.slot for enter in enters]
    for name in ("num_cached_tokens", "num_prompt_tokens", "max_num_tokens"):
        assert getattr(columns, name).tolist() == [getattr(enter, name) for enter in enters], name
    tables = split(columns.block_ids, columns.num_blocks)
    assert [ids.tobytes() for ids in tables] == [enter.block_bytes for enter in enters]
    assert [ids.tobytes() for ids in columns.told_tokens()] == [enter.cached_token_bytes for enter in enters]
    assert columns.sampled.tolist() == [
        (each.params.seed, each.choice, each.params.top_k, each.params.temperature, each.params.top_p)
        for each in enters
    ]
    assert columns.options == {1: EVERY_OPTION}
    assert {number: ids.tolist() for number, ids in columns.stop_token_ids.items()} == {1: [2, 9]}


def test_tests_encode_a_step_as_the_scheduler_does() -> None:
    chunks = [PrefillChunk(Slot(7), pack([2]), 1)]
    message = encode_step(Step(1, 7, plan_of([EVERY_FIELD, make_enter(1, [4], [])], chunks)))
    assert to_request(parse_step(message)) == message


def test_options_that_change_nothing_decode_to_none() -> None:
    request = to_request(prefill_step(make_enter(0, [1], [2])))
    request.enters[0].options.min_p = 0.0
    assert parse_step(request).enters.options == {0: SamplingOptions()}


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


def test_a_step_carries_the_states_to_save_and_to_restore() -> None:
    """Each pair is a slot and a checkpoint; a plan without any costs nothing, as the next test measures."""
    batch = replace(make_dummy(), state_saves=[(3, 9), (1, 4)], state_restores=[(2, 7)])
    message = encode_step(Step(1, 7, batch)).SerializeToString()
    parsed = parse_step(worker_pb2.StepRequest.FromString(message))
    assert parsed.state_saves.tolist() == [[3, 9], [1, 4]]
    assert parsed.state_restores.tolist() == [[2, 7]]
    assert parse_step(encode_step(Step(1, 7, make_dummy()))).state_saves.shape == (0, 2)


@pytest.mark.parametrize("name", ["state_saves", "state_restores"])
@pytest.mark.parametrize("data", [b"\0" * 7, b"\0" * 12])
def test_half_a_pair_is_refused(name: str, data: bytes) -> None:
    request = to_request(decode_step())
    setattr(request, name, data)
    with pytest.raises(StepMismatchError):
        parse_step(request)


def test_a_pure_decode_step_of_32_rows_takes_a_few_bytes() -> None:
    driver = EngineDriver(num_blocks=200)
    for handle in range(32):
        driver.submit(handle, [handle, 1, 2], max_tokens=60)
    sizes = []
    while driver.sent:
        step = driver.sent[0]
        batch = step.batch
        if batch.kind is StepKind.DECODE and len(batch.row_slots) == 32 and not batch.append_slots.size:
            sizes.append(encode_step(step).ByteSize())
        driver.step()
    assert len(sizes) > 20
    # Epoch, step id and kind: no token, table or row is sent again.
    assert max(sizes) == 6


def test_a_newly_opened_block_costs_eight_bytes_and_two_headers() -> None:
    driver = EngineDriver()
    driver.submit(1, list(range(16)), max_tokens=3)
    driver.step()
    message = encode_step(driver.sent[0])
    assert (len(message.append_slots), len(message.append_block_ids)) == (4, 4)
    assert message.ByteSize() == 6 + 2 * (2 + 4)


def test_a_coupled_step_carries_every_ranks_token_count_and_a_dummy_is_marked() -> None:
    batch = make_dummy(leave_slots=[3])
    message = encode_step(Step(1, 7, batch, num_tokens_across_dp=(4, 1), graph_batch_size=8))
    assert (message.is_dummy, list(message.num_tokens_across_dp), message.graph_batch_size) == (True, [4, 1], 8)
    assert message.leave_slots == np.array([3], np.int32).tobytes()
    computing = replace(batch, num_tokens=1)
    assert not encode_step(Step(1, 7, computing, num_tokens_across_dp=(1, 1))).is_dummy


def enter_of(driver: EngineDriver, handle: int, prompt: list[int], **fields: Any) -> worker_pb2.EnterSequence:
    """What the worker receives for a request that enters alone; the request then runs to its end."""
    driver.submit(handle, prompt, **fields)
    [enter] = encode_step(driver.sent[0]).enters
    driver.run()
    return enter


def test_a_worker_parses_what_a_scheduler_planned() -> None:
    driver = EngineDriver(num_draft_tokens=2)
    driver.submit(1, list(range(40)), options=SamplingOptions(presence_penalty=0.5, min_tokens=2))
    driver.run()
    driver.submit(2, list(range(40)), options=SamplingOptions(presence_penalty=0.5, min_tokens=2))
    step = driver.sent[0]
    parsed = parse_step(encode_step(step))
    assert (parsed.epoch, parsed.step_id, parsed.kind) == (step.epoch, step.step_id, step.batch.kind)
    assert parsed.leave_slots.tolist() == step.batch.leave_slots
    [planned] = step.batch.enters
    assert planned.num_cached_tokens == 32
    assert parsed.chunks.token_ids.tobytes() == planned.chunk.token_bytes
    assert parsed.enters.told_token_ids.tolist() == list(range(32))
    assert parsed.enters.options == {0: planned.params.options}


def test_a_plain_sequence_enters_without_the_optional_fields() -> None:
    enter = enter_of(EngineDriver(), 1, list(range(40)), max_tokens=5)
    assert enter.max_num_tokens == 45
    newer = ("choice", "options", "stop_token_ids", "cached_token_ids")
    assert not {field.name for field, _ in enter.ListFields()}.intersection(newer)


def test_a_sequence_enters_with_its_choice_and_options() -> None:
    driver = EngineDriver()
    options = SamplingOptions(min_p=0.25, logit_bias=((4, -1.5),))
    driver.submit(1, list(range(40)), n=2, options=options)
    enters = encode_step(driver.sent[0]).enters
    assert [(enter.choice, decode_options(enter.options)) for enter in enters] == [(0, options), (1, options)]


@pytest.mark.parametrize(("ignore_eos", "expected"), [(True, [3, 900]), (False, [3, EOS, 900])])
def test_stop_tokens_are_sent_with_min_tokens(ignore_eos: bool, expected: list[int]) -> None:
    fields = {"ignore_eos": ignore_eos, "stop_token_ids": (900, 3)}
    enter = enter_of(EngineDriver(), 1, list(range(40)), options=SamplingOptions(min_tokens=2), **fields)
    assert np.frombuffer(enter.stop_token_ids, np.int32).tolist() == expected
    assert not enter_of(EngineDriver(), 1, list(range(40)), options=SamplingOptions(min_p=0.1), **fields).stop_token_ids


@pytest.mark.parametrize(
    ("options", "num_draft_tokens", "is_sent"),
    [
        (None, 0, False),
        (None, 2, True),
        (SamplingOptions(min_p=0.1), 0, False),
        (SamplingOptions(presence_penalty=0.1), 0, True),
        (SamplingOptions(bad_words=((1, 2),)), 0, True),
    ],
)
def test_cached_tokens_are_sent_where_options_or_drafts_need_them(
    options: SamplingOptions | None, num_draft_tokens: int, is_sent: bool
) -> None:
    driver = EngineDriver(num_draft_tokens=num_draft_tokens)
    enter_of(driver, 1, list(range(40)))
    enter = enter_of(driver, 2, list(range(40)), options=options)
    assert enter.num_cached_tokens == 32
    assert np.frombuffer(enter.cached_token_ids, np.int32).tolist() == (list(range(32)) if is_sent else [])


LOGPROBS = Logprobs(
    indexes=column([0, 2]),
    ranks=column([1, 40]),
    counts=column([2, 1]),
    token_ids=column([5, 6, 7]),
    values=np.array([-0.5, -1.25, -9.0], np.float32),
)
OUTPUT = StepResult(3, 4, column([5, 6, 7]), column([1]), 250)


RARE = {
    "counts",
    "num_draft_tokens",
    "logprobs",
    "prompt_logprobs",
    "failed_grammar_rows",
    "not_finite_saves",
    "vectors",
}


def test_a_plain_result_omits_the_rare_fields() -> None:
    result = encode_result(OUTPUT)
    assert (result.epoch, result.step_id, result.device_time_us) == (3, 4, 250)
    assert (unpack(result.token_ids), unpack(result.not_finite_rows)) == ([5, 6, 7], [1])
    assert {field.name for field, _ in result.ListFields()}.isdisjoint(RARE)


def test_a_result_carries_counts_and_log_probabilities() -> None:
    result = encode_result(
        replace(
            OUTPUT,
            counts=column([0, 2, 1]),
            num_draft_tokens=9,
            logprobs=LOGPROBS,
            prompt_logprobs=((6, LOGPROBS), (2, replace(LOGPROBS, ranks=column([3, 4])))),
            failed_grammar_rows=column([2]),
            not_finite_saves=column([1]),
        )
    )
    assert (unpack(result.not_finite_saves), parse_result(result).not_finite_saves.tolist()) == ([1], [1])
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
    message = encode_result(replace(OUTPUT, logprobs=logprobs)).logprobs
    assert (unpack(message.ranks), unpack(message.requested_counts)) == ([1, 8, 40], [1, 0])


def test_counts_of_one_may_be_sent() -> None:
    assert encode_result(replace(OUTPUT, counts=column())).HasField("counts")


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": b"123"},
        {"counts": b"123"},
        {"not_finite_saves": b"123"},
        {"logprobs": sampling_pb2.Logprobs(values=b"123")},
        {"prompt_logprobs": [worker_pb2.ChunkLogprobs(logprobs=sampling_pb2.Logprobs(indexes=b"12345"))]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_result_with_a_torn_column_is_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="buffer size"):
        parse_result(worker_pb2.StepResult(epoch=1, step_id=1, **fields))


def test_a_result_without_the_newer_fields_has_one_token_per_row() -> None:
    result = parse_result(worker_pb2.StepResult(epoch=1, step_id=1))
    assert (result.counts, result.num_draft_tokens, result.logprobs, result.prompt_logprobs) == (None, 0, None, ())
