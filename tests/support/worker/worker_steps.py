"""Steps for a worker, in its internal form and on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.internal.v1 import worker_pb2
from shared.ids import Slot
from shared.request.sampling_codec import encode_options
from shared.request.sampling_params import SamplingOptions, SamplingParams
from shared.step.codec import parse_step
from shared.step.columns import Int32Column, Int64Column
from shared.step.step import SAMPLED_DTYPE, Chunks, EnteringSequence, Enters, PrefillChunk, Step, StepKind

EPOCH = 1
WIRE_DTYPE = np.dtype("<i4")


def column(values: Sequence[int] = ()) -> Int32Column:
    """An int32 column."""
    return np.array(values, dtype=np.int32)


def pack(values: Sequence[int] | Int32Column) -> bytes:
    """Encode a column."""
    return np.array(values, dtype=WIRE_DTYPE).tobytes()


def split(values: Int32Column, counts: Int64Column) -> list[Int32Column]:
    """The parts of a column, which have `counts` [num_parts] numbers each."""
    return np.split(values, np.cumsum(counts))[: len(counts)]


def unpack(data: bytes) -> list[int]:
    """Decode a column."""
    values: list[int] = np.frombuffer(data, dtype=WIRE_DTYPE).tolist()
    return values


def make_enter(
    slot: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    num_cached_tokens: int = 0,
    num_later_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    max_num_tokens: int = 1 << 20,
    options: SamplingOptions | None = None,
    cached_token_ids: Sequence[int] = (),
) -> EnteringSequence:
    """An entering sequence; its uncached tokens are all prompt."""
    num_prompt_tokens = num_cached_tokens + len(token_ids) + num_later_tokens
    return EnteringSequence(
        chunk=make_chunk(slot, token_ids, num_later_tokens),
        num_cached_tokens=num_cached_tokens,
        num_prompt_tokens=num_prompt_tokens,
        block_bytes=pack(block_ids),
        params=SamplingParams(max_num_tokens - num_prompt_tokens, temperature, seed=seed, options=options),
        cached_token_bytes=pack(cached_token_ids),
    )


def with_params(enter: EnteringSequence, **changes: Any) -> EnteringSequence:
    """`enter` with other sampling parameters."""
    return replace(enter, params=replace(enter.params, **changes))


def make_chunk(slot: int, token_ids: Sequence[int], num_later_tokens: int = 0) -> PrefillChunk:
    """The next tokens of a prompt."""
    return PrefillChunk(Slot(slot), pack(token_ids), num_later_tokens)


def prefill_step(
    *enters: EnteringSequence,
    chunks: Sequence[PrefillChunk] = (),
    leave: Sequence[int] = (),
    append: Sequence[tuple[int, int]] = (),
    step_id: int = 1,
) -> Step:
    """A step that computes chunks and entering sequences; `append` holds (slot, block id) pairs."""
    return _make_step(StepKind.PREFILL, enters, tuple(chunks), leave, append, step_id, None)


def mixed_step(
    *enters: EnteringSequence,
    chunks: Sequence[PrefillChunk] = (),
    rows: Sequence[int] | None = None,
    step_id: int = 1,
) -> Step:
    """A step that decodes, and computes chunks and entering sequences."""
    return _make_step(StepKind.MIXED, enters, tuple(chunks), (), (), step_id, rows)


def decode_step(
    *,
    leave: Sequence[int] = (),
    append: Sequence[tuple[int, int]] = (),
    rows: Sequence[int] | None = None,
    step_id: int = 1,
) -> Step:
    """A step of one token per row."""
    return _make_step(StepKind.DECODE, (), (), leave, append, step_id, rows)


def with_pairs(
    step: Step, *, saves: list[tuple[int, int]] | None = None, restores: list[tuple[int, int]] | None = None
) -> Step:
    """`step` with pairs of a slot and a checkpoint."""
    return replace(
        step,
        state_saves=column([each for pair in saves or () for each in pair]).reshape(-1, 2),
        state_restores=column([each for pair in restores or () for each in pair]).reshape(-1, 2),
    )


def to_request(step: Step) -> worker_pb2.StepRequest:
    """Encode `step`."""
    chunks = _to_chunks(step.chunks)
    num_begun = len(chunks) - len(step.enters.slots)
    return worker_pb2.StepRequest(
        epoch=step.epoch,
        step_id=step.step_id,
        kind=f"STEP_KIND_{step.kind.name}",
        leave_slots=pack(step.leave_slots),
        enters=_to_enters(step.enters, chunks[num_begun:]),
        append_slots=pack(step.append_slots),
        append_block_ids=pack(step.append_block_ids),
        decode_slots=None if step.decode_slots is None else pack(step.decode_slots),
        chunks=chunks[:num_begun],
        is_dummy=step.is_dummy,
        num_tokens_across_dp=step.num_tokens_across_dp,
        state_saves=pack(step.state_saves),
        state_restores=pack(step.state_restores),
        graph_batch_size=step.graph_batch_size,
    )


def to_columns(enters: Sequence[EnteringSequence] = (), chunks: Sequence[PrefillChunk] = ()) -> dict[str, Any]:
    """The fields `enters` and `chunks` of a step, as a worker reads them."""
    messages = [
        worker_pb2.EnterSequence(
            chunk=_to_message(enter.chunk),
            num_cached_tokens=enter.num_cached_tokens,
            num_prompt_tokens=enter.num_prompt_tokens,
            block_ids=enter.block_bytes,
            temperature=enter.params.temperature,
            top_k=enter.params.top_k,
            top_p=enter.params.top_p,
            seed=enter.params.seed,
            max_num_tokens=enter.max_num_tokens,
            choice=enter.choice,
            options=None if enter.params.options is None else encode_options(enter.params.options),
            stop_token_ids=pack(enter.stop_token_ids),
            cached_token_ids=enter.cached_token_bytes,
        )
        for enter in enters
    ]
    kind = worker_pb2.STEP_KIND_PREFILL
    step = parse_step(worker_pb2.StepRequest(kind=kind, enters=messages, chunks=map(_to_message, chunks)))
    return {"enters": step.enters, "chunks": step.chunks}


def heartbeat_request(epoch: int = EPOCH, scheduler: str = "test") -> worker_pb2.StepRequest:
    """A scheduler's heartbeat, the first message of a stream."""
    return worker_pb2.StepRequest(epoch=epoch, scheduler_instance_id=scheduler, heartbeat=worker_pb2.Heartbeat())


def _to_message(chunk: PrefillChunk) -> worker_pb2.PrefillChunk:
    return worker_pb2.PrefillChunk(
        slot=chunk.slot, token_ids=chunk.token_bytes, num_later_tokens=chunk.num_later_tokens
    )


def _to_chunks(chunks: Chunks) -> list[worker_pb2.PrefillChunk]:
    columns = (chunks.slots.tolist(), split(chunks.token_ids, chunks.num_tokens), chunks.num_later_tokens.tolist())
    return [
        worker_pb2.PrefillChunk(slot=slot, token_ids=pack(token_ids), num_later_tokens=num_later)
        for slot, token_ids, num_later in zip(*columns, strict=True)
    ]


def _to_enters(enters: Enters, chunks: Sequence[worker_pb2.PrefillChunk]) -> list[worker_pb2.EnterSequence]:
    block_ids, told_tokens = split(enters.block_ids, enters.num_blocks), enters.told_tokens()
    sampled = [dict(zip(SAMPLED_DTYPE.names or (), each, strict=True)) for each in enters.sampled.tolist()]
    return [
        worker_pb2.EnterSequence(
            chunk=chunk,
            num_cached_tokens=int(enters.num_cached_tokens[number]),
            num_prompt_tokens=int(enters.num_prompt_tokens[number]),
            block_ids=pack(block_ids[number]),
            max_num_tokens=int(enters.max_num_tokens[number]),
            options=encode_options(enters.options[number]) if number in enters.options else None,
            stop_token_ids=pack(enters.stop_token_ids.get(number, ())),
            cached_token_ids=pack(told_tokens[number]),
            **sampled[number],
        )
        for number, chunk in enumerate(chunks)
    ]


def _make_step(  # noqa: PLR0917 - a step's parts in the protocol's order
    kind: StepKind,
    enters: tuple[EnteringSequence, ...],
    chunks: tuple[PrefillChunk, ...],
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
        append_slots=column([slot for slot, _ in append]),
        append_block_ids=column([block_id for _, block_id in append]),
        decode_slots=None if rows is None else column(rows),
        **to_columns(enters, chunks),
    )
