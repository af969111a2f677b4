"""The link to a group: the size of a step on the wire, and its connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from lockstep.internal.v1 import sampling_pb2, worker_pb2
from services.scheduler.cell.domains.attach import AttachEvent, Refused
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.batch.step import ScheduledBatch, Step, StepCounts, StepKind
from services.scheduler.workers.worker_client import GroupLink, decode_result, encode_step
from shared.ids import DpRank, Slot
from shared.limits import SamplingOptions
from shared.network.rpc import make_channel
from shared.sampling_codec import decode_options
from tests.support.scheduler.engine_driver import EOS, EngineDriver


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


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": b"123"},
        {"counts": b"123"},
        {"logprobs": sampling_pb2.Logprobs(values=b"123")},
        {"prompt_logprobs": [worker_pb2.ChunkLogprobs(logprobs=sampling_pb2.Logprobs(indexes=b"12345"))]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_result_with_a_torn_column_is_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="buffer size"):
        decode_result(worker_pb2.StepResult(epoch=1, step_id=1, **fields))


def test_a_result_without_the_newer_fields_has_one_token_per_row() -> None:
    result = decode_result(worker_pb2.StepResult(epoch=1, step_id=1))
    assert (result.counts, result.num_draft_tokens, result.logprobs, result.prompt_logprobs) == (None, 0, None, ())


def test_a_plain_result_reports_replayed_tokens() -> None:
    message = worker_pb2.StepResult(epoch=1, step_id=1, token_ids=b"1234", num_replayed_tokens=5)
    result = decode_result(message)
    assert (result.num_replayed_tokens, result.num_replay_mismatches) == (5, 0)
    message.num_replay_mismatches = 2
    assert decode_result(message).num_replay_mismatches == 2
    assert (result.counts, result.logprobs) == (None, None)


def test_a_coupled_step_carries_every_ranks_token_count_and_a_dummy_is_marked() -> None:
    batch = make_dummy(leave_slots=[3])
    message = encode_step(Step(1, 7, batch, num_tokens_across_dp=(4, 1), graph_batch_size=8))
    assert (message.is_dummy, list(message.num_tokens_across_dp), message.graph_batch_size) == (True, [4, 1], 8)
    assert message.leave_slots == np.array([3], np.int32).tobytes()
    computing = replace(batch, num_tokens=1)
    assert not encode_step(Step(1, 7, computing, num_tokens_across_dp=(1, 1))).is_dummy


def test_steps_are_counted_by_kind() -> None:
    counts = StepCounts()
    driver = EngineDriver()
    driver.submit(1, [1, 2], max_tokens=4)
    while driver.sent:
        counts.add(driver.sent[0].batch)
        driver.step()
    counts.add(make_dummy())
    assert counts == StepCounts(prefill=1, decode=3, dummy=1)


def enter_of(driver: EngineDriver, handle: int, prompt: list[int], **fields: Any) -> worker_pb2.EnterSequence:
    """What the worker receives for a request that enters alone; the request then runs to its end."""
    driver.submit(handle, prompt, **fields)
    [enter] = encode_step(driver.sent[0]).enters
    driver.run()
    return enter


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


async def test_an_offer_that_was_not_delivered_is_repeated_over_a_new_connection(tmp_path: Path) -> None:
    channels: list[grpc.aio.Channel] = []
    events: list[AttachEvent] = []

    def connect() -> grpc.aio.Channel:
        channels.append(make_channel(f"unix:{tmp_path}/none", internal=True))
        return channels[-1]

    link = GroupLink(
        DpRank(0), connect, worker_pb2.AttachRequest(), on_attach_event=events.append, on_event=lambda _: None
    )
    for epoch in (1, 2):
        await link.offer(epoch)
    assert [event.epoch for event in events if isinstance(event, Refused)] == [1, 2]
    assert len(channels) == 2
