"""Converts between messages of `Exchange` and the engine's types."""

from __future__ import annotations

import numpy as np
from google.protobuf import duration_pb2

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from services.scheduler.cell.events import ChoiceSoFar, ClientMessage, Submission
from services.scheduler.cell.state import CellState
from services.scheduler.core.batch.sequence import FinishReason, Priority
from services.scheduler.core.results.outputs import Outputs, RequestEnd, RequestStart
from shared.errors import InvalidRequestError
from shared.ids import RequestHandle
from shared.network.statuses import to_status
from shared.request.limits import MAX_CHOICES, TOKEN_DTYPE
from shared.request.sampling_codec import decode_options
from shared.request.sampling_params import NO_OPTIONS, SamplingOptions, SamplingParams
from shared.step.columns import Int32Column, encode_floats
from shared.step.logprobs_codec import encode_logprobs
from shared.tenants.tenant import DEFAULT_TENANT, MAX_CACHE_SALT_BYTES, MAX_WEIGHT, MIN_WEIGHT, Tenant
from shared.wire import find_needs

_HANDLE_DTYPE = np.dtype("<u4")
_MAX_HANDLE = 2**32 - 1
_ONE = np.ones(1, TOKEN_DTYPE).tobytes()

FINISH_REASONS = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_SEQUENCE: common_pb2.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.STOP_TOKEN: common_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: common_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.MAX_TOKENS: common_pb2.FINISH_REASON_MAX_TOKENS,
}

PRIORITIES: dict[int, Priority] = {
    common_pb2.PRIORITY_HIGH: Priority.HIGH,
    common_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    common_pb2.PRIORITY_LOW: Priority.LOW,
}


def decode_request(client: int, message: exchange_pb2.ExchangeRequest) -> ClientMessage:
    """Parse a replica's message.

    Raises:
        InvalidRequestError: a column's length is not a multiple of 4 bytes, a cache salt is too long, or there are too
            many choices or handles.
    """
    try:
        return ClientMessage(
            client,
            [_decode_submit(submit) for submit in message.submits],
            [(RequestHandle(stop_at.handle), stop_at.num_tokens) for stop_at in message.stop_ats],
            np.frombuffer(_column("abort_handles", message.abort_handles), _HANDLE_DTYPE).tolist(),
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def encode_heartbeat(progress: int, state: CellState) -> exchange_pb2.SchedulerHeartbeat:
    """Encode the heartbeat to every replica; `progress` increases with every step."""
    load = exchange_pb2.CellLoad(
        num_waiting=state.num_waiting,
        num_running=state.num_running,
        num_used_blocks=state.num_used_blocks,
        num_blocks=state.num_blocks,
        block_size=state.block_size,
    )
    return exchange_pb2.SchedulerHeartbeat(
        progress=progress, holds_workers=state.ready, load=load, takes_work=state.takes_work
    )


def encode_outputs(outputs: Outputs, *, has_timings: bool = False) -> exchange_pb2.Outputs:
    """Encode one step's outputs to one replica; `has_timings` if it has the capability `shared.wire.TIMINGS`."""
    message = exchange_pb2.Outputs(
        handles=outputs.handles.astype(_HANDLE_DTYPE, copy=False).tobytes(),
        first_indexes=outputs.first_indexes.astype(TOKEN_DTYPE, copy=False).tobytes(),
        counts=_ONE * len(outputs.handles) if outputs.counts is None else _int_column(outputs.counts),
        token_ids=outputs.token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
        starts=[_encode_start(start, has_timings=has_timings) for start in outputs.starts],
        ends=[_encode_end(end, has_timings=has_timings) for end in outputs.ends],
    )
    if outputs.logprobs is not None:
        message.logprobs.CopyFrom(encode_logprobs(outputs.logprobs))
    for handle, logprobs in outputs.prompt_logprobs:
        message.prompt_logprobs.add(handle=handle, logprobs=encode_logprobs(logprobs))
    for handle, values in outputs.vectors:
        message.vectors.add(handle=handle, values=encode_floats(values))
    for handle, num_resumes in outputs.resumes:
        message.resumes.add(handle=handle, num_resumes=num_resumes)
    return message


def _decode_submit(submit: exchange_pb2.Submit) -> Submission:
    if len(submit.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise ValueError(f"cache_salt has more than {MAX_CACHE_SALT_BYTES} bytes")
    # Submits of older replicas have no `n`.
    n = max(1, submit.n)
    if n > MAX_CHOICES or submit.handle + n - 1 > _MAX_HANDLE:
        raise ValueError("n or the handle is out of range")
    if len(submit.choices_so_far) not in (0, n):
        raise ValueError("choices_so_far must be empty or have one entry per choice")
    params = SamplingParams(
        max_tokens=submit.max_tokens,
        temperature=submit.temperature,
        top_k=submit.top_k,
        top_p=submit.top_p,
        seed=submit.seed,
        ignore_eos=submit.ignore_eos,
        stop_token_ids=_token_ids("stop_token_ids", submit.stop_token_ids),
        stop_token_sequences=tuple(
            _token_ids("stop_token_sequences", sequence) for sequence in submit.stop_token_sequences
        ),
        options=_decode_options(submit) if submit.HasField("options") else None,
    )
    return Submission(
        RequestHandle(submit.handle),
        submit.request_id,
        _column("prompt_token_ids", submit.prompt_token_ids),
        params,
        # A class unknown to this version is treated as normal, and so is an unset one from an older replica.
        priority=PRIORITIES.get(submit.priority, Priority.NORMAL),
        cache_salt=submit.cache_salt,
        attempt=max(1, submit.attempt),
        n=n,
        choices_so_far=tuple(
            ChoiceSoFar(_column("choices_so_far", choice.token_ids), choice.has_ended)
            for choice in submit.choices_so_far
        ),
        age_s=max(0.0, _seconds(submit.age)) if submit.HasField("age") else 0.0,
        time_left_s=_seconds(submit.time_left) if submit.HasField("time_left") else None,
        is_exact=submit.determinism == common_pb2.DETERMINISM_EXACT,
        num_earlier_resumes=submit.num_earlier_resumes,
        tenant=_decode_tenant(submit.tenant) if submit.HasField("tenant") else DEFAULT_TENANT,
        needs=find_needs(submit),
    )


def _decode_tenant(tenant: exchange_pb2.Tenant) -> Tenant:
    weight = tenant.weight or 1.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError("a tenant's weight is out of range")
    return Tenant(
        tenant.name,
        weight,
        max_in_flight=tenant.max_in_flight if tenant.HasField("max_in_flight") else None,
        max_waiting_requests=tenant.max_waiting_requests if tenant.HasField("max_waiting_requests") else None,
        max_waiting_tokens=tenant.max_waiting_tokens if tenant.HasField("max_waiting_tokens") else None,
    )


def _decode_options(submit: exchange_pb2.Submit) -> SamplingOptions | None:
    options = decode_options(submit.options)
    return None if options == NO_OPTIONS else options


def _token_ids(name: str, column: bytes) -> tuple[int, ...]:
    if not column:
        return ()
    return tuple(np.frombuffer(_column(name, column), TOKEN_DTYPE).tolist())


def _column(name: str, column: bytes) -> bytes:
    """Return the column.

    Raises:
        ValueError: it does not hold whole items of 4 bytes.
    """
    if len(column) % TOKEN_DTYPE.itemsize:
        raise ValueError(f"the length of {name} is not a multiple of 4 bytes")
    return column


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + 1e-9 * duration.nanos


def _int_column(values: Int32Column) -> bytes:
    return values.astype(TOKEN_DTYPE, copy=False).tobytes()


def _encode_start(start: RequestStart, *, has_timings: bool) -> exchange_pb2.RequestStart:
    return exchange_pb2.RequestStart(
        handle=start.handle,
        num_cached_tokens=start.num_cached_tokens,
        queue_time_us=_microseconds(start.queue_s),
        prefill_time_us=_microseconds(start.prefill_s) if has_timings else None,
    )


def _encode_end(end: RequestEnd, *, has_timings: bool) -> exchange_pb2.RequestEnd:
    queue_time_us = _microseconds(end.queue_s) if has_timings else None
    if end.error is not None:
        return exchange_pb2.RequestEnd(
            handle=end.handle,
            error=to_status(end.error),
            num_resumes=end.num_resumes,
            queue_time_us=queue_time_us,
        )
    assert end.finish is not None
    return exchange_pb2.RequestEnd(
        handle=end.handle,
        finish_reason=FINISH_REASONS[end.finish.reason],
        stop_token_id=end.finish.stop_token_id,
        num_completion_tokens=end.num_completion_tokens,
        num_resumes=end.num_resumes,
        queue_time_us=queue_time_us,
    )


def _microseconds(duration_s: float) -> int:
    return round(1e6 * duration_s)
