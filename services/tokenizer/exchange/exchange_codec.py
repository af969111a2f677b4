"""Converts between `Exchange` messages and the service's own types."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import numpy as np
import numpy.typing as npt

from lockstep.internal.v1 import exchange_pb2, sampling_pb2
from lockstep.v1 import common_pb2
from services.tokenizer.answer.logprobs import LogprobColumns
from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.ids import RequestHandle
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_codec import encode_options
from shared.step.columns import Float32Column, decode_floats
from shared.step.logprobs_codec import decode_logprobs
from shared.tenants.tenant import DEFAULT_TENANT, Tenant

_HANDLE_DTYPE = np.dtype("<u4")


def encode_request(request: ResolvedRequest) -> exchange_pb2.Submit:
    """Encode what the client asked for, in all its attempts."""
    sampling = request.sampling
    return exchange_pb2.Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=_column(sampling.stop_token_ids),
        stop_token_sequences=[_column(sequence) for sequence in sampling.stop_token_sequences],
        priority=cast(common_pb2.Priority, request.priority),
        cache_salt=request.cache_salt,
        n=request.n,
        options=None if sampling.options is None else encode_options(sampling.options),
        determinism=common_pb2.DETERMINISM_EXACT if request.is_exact else common_pb2.DETERMINISM_ORDINARY,
        tenant=None if request.tenant == DEFAULT_TENANT else _encode_tenant(request.tenant),
    )


def encode_submit(request: ResolvedRequest, now: float) -> exchange_pb2.Submit:
    """Encode the attempt that has just begun."""
    submit = encode_request(request)
    submit.handle, submit.attempt = request.handle, request.num_attempts
    if request.num_attempts > 1:
        # A lower bound for each of them.
        submit.num_earlier_resumes = min(choice.num_resumes for choice in request.choices if not choice.has_ended)
        submit.choices_so_far.extend(_choices_so_far(request))
    submit.age.FromTimedelta(timedelta(seconds=now - request.arrived_at))
    if request.deadline_at is not None:
        submit.time_left.FromTimedelta(timedelta(seconds=max(0.0, request.deadline_at - now)))
    return submit


def encode_handles(handles: Sequence[int]) -> bytes:
    """Encode a column of little-endian uint32."""
    return np.array(handles, _HANDLE_DTYPE).tobytes()


def read_rows(outputs: exchange_pb2.Outputs) -> list[tuple[RequestHandle, int, list[int]]]:
    """Each row's handle, first index and token ids.

    Raises:
        ExchangeError: the columns are inconsistent.
    """
    try:
        handles: list[RequestHandle] = np.frombuffer(outputs.handles, _HANDLE_DTYPE).tolist()
        first_indexes = np.frombuffer(outputs.first_indexes, TOKEN_DTYPE).tolist()
        counts = np.frombuffer(outputs.counts, TOKEN_DTYPE)
        token_ids = np.frombuffer(outputs.token_ids, TOKEN_DTYPE).tolist()
    except ValueError as error:
        raise ExchangeError("a column's size is not a multiple of 4 bytes") from error
    if len(handles) == len(first_indexes) == len(counts) == len(token_ids) and (counts == 1).all():
        # The fast path: one token per row, as in any step without speculative decoding.
        columns = zip(handles, first_indexes, token_ids, strict=True)
        return [(handle, first_index, [token_id]) for handle, first_index, token_id in columns]
    ends = counts.cumsum(dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    if not len(handles) == len(first_indexes) == len(counts) or num_tokens != len(token_ids) or (counts < 0).any():
        raise ExchangeError("the columns have inconsistent lengths")
    starts = (ends - counts).tolist()
    return [
        (handle, first_index, token_ids[start:end])
        for handle, first_index, start, end in zip(handles, first_indexes, starts, ends.tolist(), strict=True)
    ]


def read_row_logprobs(outputs: exchange_pb2.Outputs) -> dict[RequestHandle, LogprobColumns]:
    """Each row's log-probabilities by handle, without rows that have none.

    Raises:
        ExchangeError: the columns are inconsistent, or do not cover all tokens of a row.
    """
    logprobs = _read_logprobs(outputs.logprobs)
    rows = read_rows(outputs)
    ends = np.cumsum([len(token_ids) for _, _, token_ids in rows])
    places = [0, *np.searchsorted(logprobs.indexes, ends).tolist()]
    if len(logprobs) and (logprobs.indexes[0] < 0 or places[-1] < len(logprobs)):
        raise ExchangeError("there are log-probabilities without a token")
    handle_to_logprobs = {}
    for (handle, _, token_ids), start, end in zip(rows, places, places[1:], strict=False):
        if start == end:
            continue
        if end - start != len(token_ids):
            raise ExchangeError("log-probabilities are missing")
        handle_to_logprobs[handle] = logprobs.part(start, end)
    return handle_to_logprobs


def read_prompt_logprobs(message: sampling_pb2.Logprobs) -> LogprobColumns:
    """A prompt's next log-probabilities: consecutive positions, at least one.

    Raises:
        ExchangeError: the columns are inconsistent, or positions are missing.
    """
    logprobs = _read_logprobs(message)
    if not len(logprobs) or logprobs.indexes[-1] - logprobs.indexes[0] != len(logprobs) - 1:
        raise ExchangeError("log-probabilities are missing")
    return logprobs


def read_vector(message: exchange_pb2.PromptVector) -> Float32Column:
    """A prompt's vector; raises ExchangeError if it is no column of floats."""
    try:
        return decode_floats(message.values)
    except ValueError as error:
        raise ExchangeError("the size of a vector is not a multiple of 4 bytes") from error


def _encode_tenant(tenant: Tenant) -> exchange_pb2.Tenant:
    return exchange_pb2.Tenant(
        name=tenant.name,
        weight=tenant.weight,
        max_in_flight=tenant.max_in_flight,
        max_waiting_requests=tenant.max_waiting_requests,
        max_waiting_tokens=tenant.max_waiting_tokens,
    )


def _choices_so_far(request: ResolvedRequest) -> list[exchange_pb2.ChoiceSoFar]:
    if not request.has_output:
        return []
    return [
        exchange_pb2.ChoiceSoFar(token_ids=_column(choice.output), has_ended=choice.has_ended)
        for choice in request.choices
    ]


def _column(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, TOKEN_DTYPE).tobytes()


def _read_logprobs(message: sampling_pb2.Logprobs) -> LogprobColumns:
    try:
        columns = decode_logprobs(message)
    except ValueError as error:
        raise ExchangeError("the size of a column of log-probabilities is not a multiple of 4 bytes") from error
    requested, indexes, counts = columns.requested_counts, columns.indexes, columns.counts
    # Its own rank, and those of the requested tokens.
    rank_counts = np.ones(len(indexes), np.int32) if requested is None else 1 + requested
    bounds, rank_bounds = _bounds(counts), _bounds(rank_counts)
    fits = (
        len(indexes) == len(counts) == len(rank_counts)
        and rank_bounds[-1] == len(columns.ranks)
        and bounds[-1] == len(columns.token_ids) == len(columns.values)
    )
    if not fits or (rank_counts < 1).any() or (counts < rank_counts).any() or (np.diff(indexes) <= 0).any():
        raise ExchangeError("the columns of log-probabilities are inconsistent")
    return LogprobColumns(indexes, rank_bounds, columns.ranks, bounds, columns.token_ids, columns.values)


def _bounds(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], counts.cumsum(dtype=np.int64)])
