"""One `Exchange` stream as requests see it: submits, stops and aborts pile up on one side, outputs are handed out on
the other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.request import ResolvedRequest
from shared.errors import SchedulerLostError, ServiceError
from shared.limits import TOKEN_DTYPE, ModelLimits

_HANDLE_DTYPE = np.dtype("<u4")

# Submits beyond this go in the next message, so that one is always far below what a cell's message may be.
_SUBMIT_BYTES_PER_MESSAGE = 8 * 1024 * 1024


class ExchangeError(Exception):
    """The scheduler sent what no scheduler sends."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The cell at the other end."""

    scheduler_instance_id: str
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits


class Receiver(Protocol):
    """Where one request's tokens go. It is called no more once it has ended."""

    @property
    def num_received(self) -> int:
        """Tokens received so far."""

    def begin(self, num_cached_tokens: int) -> None:
        """Take the number of prompt tokens that were cached; once, before the first tokens."""

    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        """Take tokens and an end; returns the number of tokens at which a stop found in text ended the request."""

    def fail(self, error: ServiceError) -> None:
        """Take the error that ended the request."""


class ExchangeLink:
    """The requests on one stream.

    Invariant: a receiver stays here from its submit until its end, its stop, its abort or the link's end; all that
    comes for other handles is dropped.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._handles = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}
        self._submits: dict[int, exchange_pb2.Submit] = {}
        self._stop_ats: list[exchange_pb2.StopAt] = []
        self._aborts: list[int] = []
        self._has_news = asyncio.Event()

    def submit(self, request: ResolvedRequest, receiver: Receiver) -> int:
        """Send a request up; returns the handle to abort it by.

        Raises:
            SchedulerLostError: the link is closed.
        """
        if self.is_closed:
            raise SchedulerLostError("the link to the scheduler was lost")
        handle = next(self._handles)
        self._receivers[handle] = receiver
        self._submits[handle] = _encode_submit(handle, request)
        self._has_news.set()
        return handle

    def abort(self, handle: int) -> None:
        """Have a request forgotten; nothing happens when it has ended."""
        if self._receivers.pop(handle, None) is None:
            return
        # One that was not sent yet has not to be.
        if self._submits.pop(handle, None) is None:
            self._aborts.append(handle)
            self._has_news.set()

    def close(self, error: ServiceError) -> None:
        """The stream is over: every request on it ends with `error`."""
        self.is_closed = True
        self._has_news.set()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.fail(error)

    async def messages(self) -> AsyncIterator[exchange_pb2.ExchangeRequest]:
        """What goes up, until the link is closed: each message holds all that piled up while the last one left."""
        while True:
            await self._has_news.wait()
            if self.is_closed:
                return
            yield self._take_message()

    def on_outputs(self, outputs: exchange_pb2.Outputs) -> None:
        """Hand out one step's beginnings, tokens and ends.

        Raises:
            ExchangeError: the columns do not fit each other, or tokens are missing.
        """
        for start in outputs.starts:
            if start.handle in self._receivers:
                self._receivers[start.handle].begin(start.num_cached_tokens)
        ends = {end.handle: end for end in outputs.ends}
        for handle, first_index, token_ids in _rows(outputs):
            receiver = self._receivers.get(handle)
            if receiver is not None:
                if receiver.num_received != first_index:
                    raise ExchangeError("tokens are missing or repeated")
                self._deliver(handle, receiver, token_ids, ends.get(handle))
        for handle, end in ends.items():
            receiver = self._receivers.get(handle)
            if receiver is not None:
                self._deliver(handle, receiver, (), end)

    def _deliver(
        self, handle: int, receiver: Receiver, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None
    ) -> None:
        stop_at = receiver.receive(token_ids, end)
        if stop_at is not None:
            self._stop_ats.append(exchange_pb2.StopAt(handle=handle, num_tokens=stop_at))
            self._has_news.set()
        if end is not None or stop_at is not None:
            del self._receivers[handle]

    def _take_message(self) -> exchange_pb2.ExchangeRequest:
        message = exchange_pb2.ExchangeRequest(
            stop_ats=self._stop_ats, abort_handles=np.array(self._aborts, _HANDLE_DTYPE).tobytes()
        )
        self._stop_ats, self._aborts = [], []
        num_bytes = 0
        while self._submits and num_bytes < _SUBMIT_BYTES_PER_MESSAGE:
            submit = self._submits.pop(next(iter(self._submits)))
            num_bytes += len(submit.prompt_token_ids)
            message.submits.append(submit)
        if not self._submits:
            self._has_news.clear()
        return message


def _rows(outputs: exchange_pb2.Outputs) -> list[tuple[int, int, list[int]]]:
    """The handle, first index and token ids of each row."""
    try:
        handles = np.frombuffer(outputs.handles, _HANDLE_DTYPE).tolist()
        first_indexes = np.frombuffer(outputs.first_indexes, TOKEN_DTYPE).tolist()
        counts = np.frombuffer(outputs.counts, TOKEN_DTYPE)
        token_ids = np.frombuffer(outputs.token_ids, TOKEN_DTYPE).tolist()
    except ValueError as error:
        raise ExchangeError("a column is no multiple of 4 bytes") from error
    ends = counts.cumsum(dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    if not len(handles) == len(first_indexes) == len(counts) or num_tokens != len(token_ids) or (counts < 0).any():
        raise ExchangeError("the columns do not fit each other")
    starts = (ends - counts).tolist()
    return [
        (handle, first_index, token_ids[start:end])
        for handle, first_index, start, end in zip(handles, first_indexes, starts, ends.tolist(), strict=True)
    ]


def _encode_submit(handle: int, request: ResolvedRequest) -> exchange_pb2.Submit:
    sampling = request.sampling
    return exchange_pb2.Submit(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids.astype(TOKEN_DTYPE, copy=False).tobytes(),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=_column(sampling.stop_token_ids),
        stop_token_sequences=[_column(sequence) for sequence in sampling.stop_token_sequences],
    )


def _column(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, TOKEN_DTYPE).tobytes()
