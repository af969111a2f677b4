"""Converts between `Exchange` messages and the service's own types."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import numpy as np

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.request.request import Request
from shared.ids import RequestHandle
from shared.limits import TOKEN_DTYPE
from shared.sampling_codec import encode_options

_HANDLE_DTYPE = np.dtype("<u4")


def encode_submit(request: Request, now: float) -> exchange_pb2.Submit:
    """Encode the attempt that has just begun."""
    sampling, time_left_s = request.sampling, request.time_left_s(now)
    return exchange_pb2.Submit(
        handle=request.handle,
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
        attempt=request.num_attempts,
        choices_so_far=_choices_so_far(request),
        age=timedelta(seconds=now - request.arrived_at),
        time_left=None if time_left_s is None else timedelta(seconds=max(0.0, time_left_s)),
        n=request.n,
        options=None if sampling.options is None else encode_options(sampling.options),
        determinism=common_pb2.DETERMINISM_EXACT if request.is_exact else common_pb2.DETERMINISM_ORDINARY,
        num_earlier_resumes=request.num_resumes,
    )


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


def _choices_so_far(request: Request) -> list[exchange_pb2.ChoiceSoFar]:
    if not request.has_output:
        return []
    return [
        exchange_pb2.ChoiceSoFar(token_ids=_column(choice.output), has_ended=choice.has_ended)
        for choice in request.choices
    ]


def _column(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, TOKEN_DTYPE).tobytes()
