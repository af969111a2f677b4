"""Steps and their results as messages: how each is encoded by one side and parsed by the other.

Columns are little-endian int32 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.internal.v1 import sampling_pb2, worker_pb2
from shared.errors import StepMismatchError
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_codec import decode_options, encode_options
from shared.request.sampling_params import SamplingOptions
from shared.step.columns import Int32Column, Int64Column, StatePairs, decode_floats, encode_floats
from shared.step.logprobs_codec import decode_logprobs, encode_logprobs
from shared.step.step import (
    NO_CHUNKS,
    NO_ENTERS,
    NO_INTS,
    NO_PAIRS,
    SAMPLED_DTYPE,
    Chunks,
    EnteringSequence,
    Enters,
    PrefillChunk,
    Step,
    StepKind,
    StepResult,
)

_KIND_TO_WIRE = {
    StepKind.PREFILL: worker_pb2.STEP_KIND_PREFILL,
    StepKind.DECODE: worker_pb2.STEP_KIND_DECODE,
    StepKind.MIXED: worker_pb2.STEP_KIND_MIXED,
}
_WIRE_TO_KIND = {number: kind for kind, number in _KIND_TO_WIRE.items()}

_Ints = Sequence[int] | npt.NDArray[np.integer[Any]]


class PlannedBatch(Protocol):
    """What one rank computes in a step, by its scheduler's plan; `Step` says more about each part."""

    @property
    def kind(self) -> StepKind:
        """What the step computes."""

    @property
    def leave_slots(self) -> Sequence[int]:
        """Sequences that leave the batch."""

    @property
    def enters(self) -> Sequence[EnteringSequence]:
        """Sequences that enter it."""

    @property
    def append_slots(self) -> _Ints:
        """Sequences that get a block, parallel to `append_block_ids`."""

    @property
    def append_block_ids(self) -> Sequence[int]:
        """The blocks they get."""

    @property
    def decode_slots(self) -> _Ints:
        """Sequences to decode, in batch order."""

    @property
    def skips_rows(self) -> bool:
        """Whether a worker could not derive `decode_slots`, so that they are sent."""

    @property
    def chunks(self) -> Sequence[PrefillChunk]:
        """Next tokens of sequences that entered before."""

    @property
    def is_dummy(self) -> bool:
        """Whether the step computes no sequence."""

    @property
    def num_dummy_tokens(self) -> int:
        """The tokens of a dummy, at least 1."""

    @property
    def state_saves(self) -> StatePairs:
        """Slots, each with the checkpoint that gets its recurrent state."""

    @property
    def state_restores(self) -> StatePairs:
        """Slots of sequences that enter, each with the checkpoint of its recurrent state."""


class PlannedStep(Protocol):
    """A batch for its rank. A protocol, since the scheduler's class has columns of its own."""

    @property
    def epoch(self) -> int:
        """The epoch of the claim."""

    @property
    def step_id(self) -> int:
        """The step's number in its epoch, from 1."""

    @property
    def batch(self) -> PlannedBatch:
        """What the rank computes."""

    @property
    def num_tokens_across_dp(self) -> Sequence[int]:
        """Tokens on each coupled rank; empty if ranks are not coupled."""

    @property
    def graph_batch_size(self) -> int:
        """The batch size of the graph that coupled ranks run; 0 means that all run eagerly."""


def encode_step(step: PlannedStep) -> worker_pb2.StepRequest:
    """Encode a step."""
    batch = step.batch
    request = worker_pb2.StepRequest(epoch=step.epoch, step_id=step.step_id, kind=_KIND_TO_WIRE[batch.kind])
    if batch.leave_slots:
        request.leave_slots = _pack(batch.leave_slots)
    if batch.append_block_ids:
        request.append_slots = _pack(batch.append_slots)
        request.append_block_ids = _pack(batch.append_block_ids)
    if batch.skips_rows:
        request.decode_slots = _pack(batch.decode_slots)
    if batch.enters:
        request.enters.extend(_encode_enter(enter) for enter in batch.enters)
    if batch.chunks:
        request.chunks.extend(_encode_chunk(chunk) for chunk in batch.chunks)
    if batch.state_saves:
        request.state_saves = _pack(batch.state_saves)
    if batch.state_restores:
        request.state_restores = _pack(batch.state_restores)
    if batch.is_dummy:
        request.is_dummy = True
        if batch.num_dummy_tokens > 1:
            request.num_dummy_tokens = batch.num_dummy_tokens
    if step.num_tokens_across_dp:
        request.num_tokens_across_dp.extend(step.num_tokens_across_dp)
        request.graph_batch_size = step.graph_batch_size
    return request


def parse_step(request: worker_pb2.StepRequest) -> Step:
    """Parse into columns; `InputBatch` checks whether the step fits.

    Raises:
        StepMismatchError: the kind is unknown, a column's length is not a multiple of 4 bytes (8, for pairs), or
            parallel columns of the sampling options differ in length.
    """
    kind = _WIRE_TO_KIND.get(request.kind)
    if kind is None:
        raise StepMismatchError("unknown step kind", kind=request.kind)
    return Step(
        epoch=request.epoch,
        step_id=request.step_id,
        kind=kind,
        leave_slots=_column("leave_slots", request.leave_slots),
        enters=_parse_enters(request.enters) if request.enters else NO_ENTERS,
        append_slots=_column("append_slots", request.append_slots),
        append_block_ids=_column("append_block_ids", request.append_block_ids),
        decode_slots=_column("decode_slots", request.decode_slots) if request.HasField("decode_slots") else None,
        chunks=_parse_chunks(request) if request.chunks or request.enters else NO_CHUNKS,
        is_dummy=request.is_dummy,
        num_tokens_across_dp=tuple(request.num_tokens_across_dp),
        graph_batch_size=request.graph_batch_size,
        state_saves=_pairs("state_saves", request.state_saves),
        state_restores=_pairs("state_restores", request.state_restores),
        num_dummy_tokens=max(1, request.num_dummy_tokens),
    )


def encode_result(result: StepResult) -> worker_pb2.StepResult:
    """Encode a step's result."""
    return worker_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        token_ids=_pack(result.token_ids),
        not_finite_rows=_pack(result.not_finite_rows),
        failed_grammar_rows=_pack(result.failed_grammar_rows),
        not_finite_saves=_pack(result.not_finite_saves),
        device_time_us=result.device_time_us,
        counts=None if result.counts is None else _pack(result.counts),
        num_draft_tokens=result.num_draft_tokens,
        logprobs=None if result.logprobs is None else encode_logprobs(result.logprobs),
        prompt_logprobs=[
            worker_pb2.ChunkLogprobs(slot=slot, logprobs=encode_logprobs(logprobs))
            for slot, logprobs in result.prompt_logprobs
        ],
        vectors=[worker_pb2.SlotVector(slot=slot, values=encode_floats(values)) for slot, values in result.vectors],
    )


def parse_result(message: worker_pb2.StepResult) -> StepResult:
    """Parse a result.

    Raises:
        ValueError: a column's length is not a multiple of 4 bytes.
    """
    token_ids = np.frombuffer(message.token_ids, TOKEN_DTYPE)
    rows = message.not_finite_rows
    not_finite_rows = np.frombuffer(rows, TOKEN_DTYPE) if rows else NO_INTS
    # The rest is rare and must not slow down a plain step of 512 rows.
    if not (
        message.num_draft_tokens
        or message.counts
        or message.failed_grammar_rows
        or message.prompt_logprobs
        or message.not_finite_saves
        or message.HasField("logprobs")
        or message.vectors
    ):
        return StepResult(
            message.epoch,
            message.step_id,
            token_ids,
            not_finite_rows,
            message.device_time_us,
            None,
            0,
            None,
            (),
            NO_INTS,
            NO_INTS,
        )
    return StepResult(
        message.epoch,
        message.step_id,
        token_ids,
        not_finite_rows,
        message.device_time_us,
        counts=np.frombuffer(message.counts, TOKEN_DTYPE) if message.HasField("counts") else None,
        num_draft_tokens=message.num_draft_tokens,
        logprobs=decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=tuple((chunk.slot, decode_logprobs(chunk.logprobs)) for chunk in message.prompt_logprobs),
        failed_grammar_rows=np.frombuffer(message.failed_grammar_rows, TOKEN_DTYPE),
        not_finite_saves=np.frombuffer(message.not_finite_saves, TOKEN_DTYPE),
        vectors=tuple((vector.slot, decode_floats(vector.values)) for vector in message.vectors),
    )


def _encode_enter(enter: EnteringSequence) -> worker_pb2.EnterSequence:
    params = enter.params
    return worker_pb2.EnterSequence(
        chunk=_encode_chunk(enter.chunk),
        num_cached_tokens=enter.num_cached_tokens,
        num_prompt_tokens=enter.num_prompt_tokens,
        block_ids=enter.block_bytes,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        choice=enter.choice,
        options=None if params.options is None else encode_options(params.options),
        stop_token_ids=_pack(enter.stop_token_ids) if enter.stop_token_ids else b"",
        cached_token_ids=enter.cached_token_bytes,
        max_num_tokens=enter.max_num_tokens,
    )


def _parse_chunks(request: worker_pb2.StepRequest) -> Chunks:
    chunks = [*request.chunks, *(enter.chunk for enter in request.enters)]
    slots, num_later_tokens = np.array(
        [[chunk.slot for chunk in chunks], [chunk.num_later_tokens for chunk in chunks]], np.int64
    )
    return Chunks(slots, *_joined("chunks.token_ids", [chunk.token_ids for chunk in chunks]), num_later_tokens)


def _parse_enters(enters: Sequence[worker_pb2.EnterSequence]) -> Enters:
    slots, num_cached_tokens, num_prompt_tokens, max_num_tokens = np.array(
        [
            [enter.chunk.slot for enter in enters],
            [enter.num_cached_tokens for enter in enters],
            [enter.num_prompt_tokens for enter in enters],
            [enter.max_num_tokens for enter in enters],
        ],
        np.int64,
    )
    num_blocks, block_ids = _joined("enters.block_ids", [enter.block_ids for enter in enters])
    num_told_tokens, told_token_ids = _joined("enters.cached_token_ids", [enter.cached_token_ids for enter in enters])
    sampled = [(enter.seed, enter.choice, enter.top_k, enter.temperature, enter.top_p) for enter in enters]
    return Enters(
        slots=slots,
        num_cached_tokens=num_cached_tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=max_num_tokens,
        num_blocks=num_blocks,
        block_ids=block_ids,
        num_told_tokens=num_told_tokens,
        told_token_ids=told_token_ids,
        sampled=np.array(sampled, SAMPLED_DTYPE),
        options={
            number: _parse_options(enter.options) for number, enter in enumerate(enters) if enter.HasField("options")
        },
        stop_token_ids={
            number: _column("enters.stop_token_ids", enter.stop_token_ids)
            for number, enter in enumerate(enters)
            if enter.stop_token_ids
        },
    )


def _parse_options(options: sampling_pb2.SamplingOptions) -> SamplingOptions:
    try:
        return decode_options(options)
    except ValueError as error:
        raise StepMismatchError(f"enters.options: {error}") from error


def _encode_chunk(chunk: PrefillChunk) -> worker_pb2.PrefillChunk:
    return worker_pb2.PrefillChunk(
        slot=chunk.slot, token_ids=chunk.token_bytes, num_later_tokens=chunk.num_later_tokens
    )


def _pack(values: _Ints | StatePairs) -> bytes:
    return np.asarray(values, TOKEN_DTYPE).tobytes()


def _column(name: str, data: bytes) -> Int32Column:
    if len(data) % TOKEN_DTYPE.itemsize:
        raise _torn(name, len(data))
    return np.frombuffer(data, dtype=TOKEN_DTYPE)


def _pairs(name: str, data: bytes) -> Int32Column:
    """Returns [num_pairs, 2]."""
    if not data:
        return NO_PAIRS
    column = _column(name, data)
    if len(column) % 2:
        raise StepMismatchError("a column of pairs has an odd length", column=name, num_values=len(column))
    return column.reshape(-1, 2)


def _joined(name: str, parts: list[bytes]) -> tuple[Int64Column, Int32Column]:
    """How many numbers each of these columns has, and all of them, column after column."""
    num_bytes = [len(part) for part in parts]
    for num in num_bytes:
        if num % TOKEN_DTYPE.itemsize:
            raise _torn(name, num)
    return np.array(num_bytes, np.int64) // TOKEN_DTYPE.itemsize, np.frombuffer(b"".join(parts), TOKEN_DTYPE)


def _torn(name: str, num_bytes: int) -> StepMismatchError:
    return StepMismatchError("a column's length is not a multiple of 4 bytes", column=name, num_bytes=num_bytes)
