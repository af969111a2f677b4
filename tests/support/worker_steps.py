"""Steps for a worker, in its own form and on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.internal.v1 import worker_pb2
from services.worker.step import EnteringSequence, Int32Column, Step, StepKind

EPOCH = 1
WIRE_DTYPE = np.dtype("<i4")


def column(values: Sequence[int] = ()) -> Int32Column:
    """An int32 column."""
    return np.array(values, dtype=np.int32)


def pack(values: Sequence[int] | Int32Column) -> bytes:
    """A column on the wire."""
    return np.array(values, dtype=WIRE_DTYPE).tobytes()


def unpack(data: bytes) -> list[int]:
    """The values of a column on the wire."""
    values: list[int] = np.frombuffer(data, dtype=WIRE_DTYPE).tolist()
    return values


def make_enter(
    slot: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    num_cached_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
) -> EnteringSequence:
    """A sequence that enters; its uncached tokens are all prompt."""
    return EnteringSequence(
        slot=slot,
        token_ids=column(token_ids),
        num_cached_tokens=num_cached_tokens,
        num_prompt_tokens=num_cached_tokens + len(token_ids),
        block_ids=column(block_ids),
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        seed=seed,
    )


def prefill_step(
    *enters: EnteringSequence, leave: Sequence[int] = (), append: Sequence[tuple[int, int]] = (), step_id: int = 1
) -> Step:
    """A step that computes the sequences that enter; `append` holds (slot, block id) pairs."""
    return _make_step(StepKind.PREFILL, enters, leave, append, step_id, None)


def decode_step(
    *,
    leave: Sequence[int] = (),
    append: Sequence[tuple[int, int]] = (),
    rows: Sequence[int] | None = None,
    step_id: int = 1,
) -> Step:
    """A step of one token per row."""
    return _make_step(StepKind.DECODE, (), leave, append, step_id, rows)


def to_request(step: Step) -> worker_pb2.StepRequest:
    """The message that carries `step`."""
    kind = worker_pb2.STEP_KIND_PREFILL if step.kind is StepKind.PREFILL else worker_pb2.STEP_KIND_DECODE
    return worker_pb2.StepRequest(
        epoch=step.epoch,
        step_id=step.step_id,
        kind=kind,
        leave_slots=pack(step.leave_slots),
        enters=[
            worker_pb2.EnterSequence(
                slot=enter.slot,
                token_ids=pack(enter.token_ids),
                num_cached_tokens=enter.num_cached_tokens,
                num_prompt_tokens=enter.num_prompt_tokens,
                block_ids=pack(enter.block_ids),
                temperature=enter.temperature,
                top_k=enter.top_k,
                top_p=enter.top_p,
                seed=enter.seed,
            )
            for enter in step.enters
        ],
        append_slots=pack(step.append_slots),
        append_block_ids=pack(step.append_block_ids),
        row_slots=None if step.row_slots is None else pack(step.row_slots),
    )


def _make_step(
    kind: StepKind,
    enters: tuple[EnteringSequence, ...],
    leave: Sequence[int],
    append: Sequence[tuple[int, int]],
    step_id: int,
    rows: Sequence[int] | None,
) -> Step:
    return Step(
        epoch=EPOCH,
        step_id=step_id,
        kind=kind,
        leave_slots=column(leave),
        enters=enters,
        append_slots=column([slot for slot, _ in append]),
        append_block_ids=column([block_id for _, block_id in append]),
        row_slots=None if rows is None else column(rows),
    )
