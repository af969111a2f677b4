"""Converts steps between protobuf and `services.worker.step`. Columns are little-endian int32 bytes."""

from __future__ import annotations

import numpy as np

from lockstep.internal.v1 import sampling_pb2, worker_pb2
from services.worker.step import EnteringSequence, Int32Column, PrefillChunk, Step, StepKind, StepOutput
from shared.errors import StepMismatchError
from shared.limits import SamplingOptions
from shared.sampling_codec import decode_options, encode_logprobs

_WIRE_DTYPE = np.dtype("<i4")
_KINDS = {
    worker_pb2.STEP_KIND_PREFILL: StepKind.PREFILL,
    worker_pb2.STEP_KIND_DECODE: StepKind.DECODE,
    worker_pb2.STEP_KIND_MIXED: StepKind.MIXED,
}


def parse_step(request: worker_pb2.StepRequest) -> Step:
    """Parse without copying columns; `InputBatch` checks whether the step fits.

    Raises:
        StepMismatchError: the kind is unknown, a column's length is not a multiple of 4 bytes, or parallel columns of
            the sampling options differ in length.
    """
    kind = _KINDS.get(request.kind)
    if kind is None:
        raise StepMismatchError("unknown step kind", kind=request.kind)
    return Step(
        epoch=request.epoch,
        step_id=request.step_id,
        kind=kind,
        leave_slots=_column("leave_slots", request.leave_slots),
        enters=tuple(_parse_enter(enter) for enter in request.enters),
        append_slots=_column("append_slots", request.append_slots),
        append_block_ids=_column("append_block_ids", request.append_block_ids),
        decode_slots=_column("decode_slots", request.decode_slots) if request.HasField("decode_slots") else None,
        chunks=tuple(_parse_chunk("chunks", chunk) for chunk in request.chunks),
        is_dummy=request.is_dummy,
        num_tokens_across_dp=tuple(request.num_tokens_across_dp),
        graph_batch_size=request.graph_batch_size,
    )


def to_result(output: StepOutput) -> worker_pb2.StepResult:
    """Encode a step's result."""
    return worker_pb2.StepResult(
        epoch=output.epoch,
        step_id=output.step_id,
        token_ids=_pack(output.token_ids),
        not_finite_rows=_pack(output.not_finite_rows),
        failed_grammar_rows=_pack(output.failed_grammar_rows),
        device_time_us=output.device_time_us,
        counts=None if output.counts is None else _pack(output.counts),
        num_draft_tokens=output.num_draft_tokens,
        logprobs=None if output.logprobs is None else encode_logprobs(output.logprobs),
        prompt_logprobs=[
            worker_pb2.ChunkLogprobs(slot=slot, logprobs=encode_logprobs(logprobs))
            for slot, logprobs in output.prompt_logprobs
        ],
        num_replayed_tokens=output.num_replayed_tokens,
        num_replay_mismatches=output.num_replay_mismatches,
    )


def _parse_enter(enter: worker_pb2.EnterSequence) -> EnteringSequence:
    return EnteringSequence(
        chunk=_parse_chunk("enters.chunk", enter.chunk),
        num_cached_tokens=enter.num_cached_tokens,
        num_prompt_tokens=enter.num_prompt_tokens,
        block_ids=_column("enters.block_ids", enter.block_ids),
        temperature=enter.temperature,
        top_k=enter.top_k,
        top_p=enter.top_p,
        seed=enter.seed,
        choice=enter.choice,
        options=_parse_options(enter.options) if enter.HasField("options") else None,
        stop_token_ids=_column("enters.stop_token_ids", enter.stop_token_ids),
        cached_token_ids=_column("enters.cached_token_ids", enter.cached_token_ids),
        max_num_tokens=enter.max_num_tokens,
    )


def _parse_options(options: sampling_pb2.SamplingOptions) -> SamplingOptions:
    try:
        return decode_options(options)
    except ValueError as error:
        raise StepMismatchError(f"enters.options: {error}") from error


def _parse_chunk(column: str, chunk: worker_pb2.PrefillChunk) -> PrefillChunk:
    return PrefillChunk(chunk.slot, _column(f"{column}.token_ids", chunk.token_ids), chunk.num_later_tokens)


def _pack(column: Int32Column) -> bytes:
    return column.astype(_WIRE_DTYPE, copy=False).tobytes()


def _column(name: str, data: bytes) -> Int32Column:
    if len(data) % _WIRE_DTYPE.itemsize:
        raise StepMismatchError("a column's length is not a multiple of 4 bytes", column=name, num_bytes=len(data))
    return np.frombuffer(data, dtype=_WIRE_DTYPE)
