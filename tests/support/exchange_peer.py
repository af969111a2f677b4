"""An ExchangeService over real gRPC that says what a test tells it to: for tests of the tokenizer service."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc, sampling_pb2
from lockstep.v1 import common_pb2
from shared.errors import NotReadyError, ServiceError
from shared.limits import TOKEN_DTYPE
from shared.rpc import to_status


def column(values: Iterable[int]) -> bytes:
    """A column of little-endian int32."""
    return np.array(list(values), TOKEN_DTYPE).tobytes()


def read_column(data: bytes) -> list[int]:
    """The numbers of a column."""
    values: list[int] = np.frombuffer(data, TOKEN_DTYPE).tolist()
    return values


@dataclass(frozen=True)
class Position:
    """Log-probabilities at one position: the rank of its own token, then that token and the likeliest ones."""

    rank: int
    entries: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Row:
    """Tokens of one choice in one message; with its first ones, how much of its prompt was cached.

    `logprobs` has a position for each token, or none.
    """

    handle: int
    first_index: int
    token_ids: Sequence[int]
    num_cached_tokens: int = 0
    logprobs: Sequence[Position] = ()


@dataclass(frozen=True)
class PromptRow:
    """Log-probabilities of the next tokens of a request's prompt, the first of which stands at `first_position`."""

    handle: int
    first_position: int
    logprobs: Sequence[Position]


def make_logprobs(positions: dict[int, Position]) -> sampling_pb2.Logprobs:
    """Log-probabilities by their index."""
    entries = [entry for position in positions.values() for entry in position.entries]
    return sampling_pb2.Logprobs(
        indexes=column(positions),
        ranks=column(position.rank for position in positions.values()),
        counts=column(len(position.entries) for position in positions.values()),
        token_ids=column(token_id for token_id, _ in entries),
        values=np.array([value for _, value in entries], "<f4").tobytes(),
    )


def make_outputs(
    *rows: Row, ends: Sequence[exchange_pb2.RequestEnd] = (), prompts: Sequence[PromptRow] = ()
) -> exchange_pb2.Outputs:
    """One step's outputs."""
    places = itertools.accumulate((len(row.token_ids) for row in rows), initial=0)
    positions = {
        place + number: position
        for place, row in zip(places, rows, strict=False)
        for number, position in enumerate(row.logprobs)
    }
    return exchange_pb2.Outputs(
        logprobs=make_logprobs(positions) if positions else None,
        prompt_logprobs=[
            exchange_pb2.PromptLogprobs(
                handle=prompt.handle, logprobs=make_logprobs(dict(enumerate(prompt.logprobs, prompt.first_position)))
            )
            for prompt in prompts
        ],
        handles=column(row.handle for row in rows),
        first_indexes=column(row.first_index for row in rows),
        counts=column(len(row.token_ids) for row in rows),
        token_ids=column(token_id for row in rows for token_id in row.token_ids),
        starts=[
            exchange_pb2.RequestStart(handle=row.handle, num_cached_tokens=row.num_cached_tokens)
            for row in rows
            if row.first_index == 0
        ],
        ends=ends,
    )


def make_end(
    handle: int,
    reason: common_pb2.FinishReason,
    num_tokens: int,
    *,
    stop_token_id: int | None = None,
) -> exchange_pb2.RequestEnd:
    """A finish."""
    return exchange_pb2.RequestEnd(
        handle=handle,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_completion_tokens=num_tokens,
    )


def make_error_end(handle: int, error: ServiceError) -> exchange_pb2.RequestEnd:
    """An end that is an error."""
    return exchange_pb2.RequestEnd(handle=handle, error=to_status(error))


class ExchangePeer(exchange_pb2_grpc.ExchangeServiceServicer):
    """Plays the scheduler: sends what it is given, keeps what it gets.

    Attributes:
        num_streams: Streams opened so far.
        num_messages: Requests received so far.
    """

    def __init__(self, cell_info: exchange_pb2.CellInfo) -> None:
        self.cell_info = cell_info
        self.num_streams = 0
        self.num_messages = 0
        self.submits: asyncio.Queue[exchange_pb2.Submit] = asyncio.Queue()
        self.stop_ats: asyncio.Queue[exchange_pb2.StopAt] = asyncio.Queue()
        self.aborts: asyncio.Queue[int] = asyncio.Queue()
        self.stream_ended = asyncio.Event()
        self._outbox: asyncio.Queue[exchange_pb2.ExchangeResponse | None] = asyncio.Queue()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        exchange_pb2_grpc.add_ExchangeServiceServicer_to_server(self, server)

    def attach(self) -> None:
        """Tell the cell, as a scheduler does once it has a worker."""
        self._outbox.put_nowait(exchange_pb2.ExchangeResponse(cell_info=self.cell_info))

    def send(self, *rows: Row, ends: Sequence[exchange_pb2.RequestEnd] = (), prompts: Sequence[PromptRow] = ()) -> None:
        """Send one step's outputs."""
        self.send_outputs(make_outputs(*rows, ends=ends, prompts=prompts))

    def send_outputs(self, outputs: exchange_pb2.Outputs) -> None:
        """Send outputs as they are."""
        self._outbox.put_nowait(exchange_pb2.ExchangeResponse(outputs=outputs))

    def end_stream(self) -> None:
        """End the stream as a scheduler does that goes away."""
        self._outbox.put_nowait(None)

    async def Exchange(
        self, request_iterator: AsyncIterator[exchange_pb2.ExchangeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[exchange_pb2.ExchangeResponse]:
        self.num_streams += 1
        self.stream_ended.clear()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (message := await self._outbox.get()) is not None:
                yield message
            raise NotReadyError("the scheduler goes away")
        finally:
            reader.cancel()
            self.stream_ended.set()

    async def _read(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]) -> None:
        async for request in requests:
            self.num_messages += 1
            for submit in request.submits:
                self.submits.put_nowait(submit)
            for stop_at in request.stop_ats:
                self.stop_ats.put_nowait(stop_at)
            for handle in read_column(request.abort_handles):
                self.aborts.put_nowait(handle)
