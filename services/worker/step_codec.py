"""Steps between their wire form and the worker's own: columns are bytes of little-endian int32."""

from __future__ import annotations

import numpy as np

from lockstep.internal.v1 import worker_pb2
from services.worker.step import EnteringSequence, Int32Column, PrefillChunk, Step, StepKind, StepOutput
from shared.errors import StepMismatchError

_WIRE_DTYPE = np.dtype("<i4")
_KINDS = {
    worker_pb2.STEP_KIND_PREFILL: StepKind.PREFILL,
    worker_pb2.STEP_KIND_DECODE: StepKind.DECODE,
    worker_pb2.STEP_KIND_MIXED: StepKind.MIXED,
}


def parse_step(request: worker_pb2.StepRequest) -> Step:
    """Read a step without copying its columns. Whether it fits the batch is `InputBatch`'s to say.

    Raises:
        StepMismatchError: the kind is unknown, or a column is not a whole number of int32.
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
    )


def to_result(output: StepOutput) -> worker_pb2.StepResult:
    """The message that answers a step."""
    return worker_pb2.StepResult(
        epoch=output.epoch,
        step_id=output.step_id,
        token_ids=output.token_ids.astype(_WIRE_DTYPE, copy=False).tobytes(),
        not_finite_rows=output.not_finite_rows.astype(_WIRE_DTYPE, copy=False).tobytes(),
        device_time_us=output.device_time_us,
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
    )


def _parse_chunk(column: str, chunk: worker_pb2.PrefillChunk) -> PrefillChunk:
    return PrefillChunk(chunk.slot, _column(f"{column}.token_ids", chunk.token_ids), chunk.num_later_tokens)


def _column(name: str, data: bytes) -> Int32Column:
    if len(data) % _WIRE_DTYPE.itemsize:
        raise StepMismatchError("a column is not a whole number of int32", column=name, num_bytes=len(data))
    return np.frombuffer(data, dtype=_WIRE_DTYPE)
