"""An ExchangeService over real gRPC that sends what a test gives it, for tests of the tokenizer service."""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc, sampling_pb2
from lockstep.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from shared.errors import NotReadyError, ServiceError
from shared.network.heartbeat import HEARTBEAT_S
from shared.network.statuses import to_status
from shared.request.limits import TOKEN_DTYPE

_HEARTBEAT = exchange_pb2.ExchangeRequest(is_heartbeat=True)


class _StreamEnd(enum.Enum):
    EXPLAINED = enum.auto()
    BROKEN = enum.auto()


def column(values: Iterable[int]) -> bytes:
    """Encode a column of little-endian int32."""
    return np.array(list(values), TOKEN_DTYPE).tobytes()


def read_column(data: bytes) -> list[int]:
    """Decode a column."""
    values: list[int] = np.frombuffer(data, TOKEN_DTYPE).tolist()
    return values


@dataclass(frozen=True)
class Position:
    """Log-probabilities at one position: the rank of its own token, then that token, requested and likeliest ones."""

    rank: int
    entries: Sequence[tuple[int, float]]
    requested_ranks: Sequence[int] = ()


@dataclass(frozen=True)
class Row:
    """Tokens of one choice in one message."""

    handle: int
    first_index: int
    token_ids: Sequence[int]
    num_cached_tokens: int = 0
    """Sent only with the first tokens."""
    queue_time_us: int | None = None
    """The same; not sent if None."""
    prefill_time_us: int | None = None
    """The same."""
    logprobs: Sequence[Position] = ()
    """One position per token, or none."""


@dataclass(frozen=True)
class PromptRow:
    """Log-probabilities of consecutive prompt tokens of a request, from `first_position` on."""

    handle: int
    first_position: int
    logprobs: Sequence[Position]


def make_logprobs(positions: dict[int, Position]) -> sampling_pb2.Logprobs:
    """Encode log-probabilities, given by index."""
    entries = [entry for position in positions.values() for entry in position.entries]
    return sampling_pb2.Logprobs(
        indexes=column(positions),
        ranks=column(rank for position in positions.values() for rank in (position.rank, *position.requested_ranks)),
        counts=column(len(position.entries) for position in positions.values()),
        token_ids=column(token_id for token_id, _ in entries),
        values=np.array([value for _, value in entries], "<f4").tobytes(),
        requested_counts=column(len(position.requested_ranks) for position in positions.values()),
    )


def make_outputs(
    *rows: Row, ends: Sequence[exchange_pb2.RequestEnd] = (), prompts: Sequence[PromptRow] = ()
) -> exchange_pb2.Outputs:
    """Encode one step's outputs."""
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
            exchange_pb2.RequestStart(
                handle=row.handle,
                num_cached_tokens=row.num_cached_tokens,
                queue_time_us=row.queue_time_us,
                prefill_time_us=row.prefill_time_us,
            )
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
    num_resumes: int = 0,
) -> exchange_pb2.RequestEnd:
    """A `RequestEnd` with a finish."""
    return exchange_pb2.RequestEnd(
        handle=handle,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_completion_tokens=num_tokens,
        num_resumes=num_resumes,
    )


def make_error_end(handle: int, error: ServiceError) -> exchange_pb2.RequestEnd:
    """A `RequestEnd` with an error."""
    return exchange_pb2.RequestEnd(handle=handle, error=to_status(error))


class _Stream:
    """What one stream sends, which a test may say before the stream is there."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[exchange_pb2.ExchangeResponse | _StreamEnd] = asyncio.Queue()
        self.is_attached = False
        self.will_end = False

    def end(self, how: _StreamEnd) -> None:
        self.will_end = True
        self.outbox.put_nowait(how)


class ExchangePeer(exchange_pb2_grpc.ExchangeServiceServicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    """Plays the scheduler: sends given messages, queues received ones, sends heartbeats, and tells a state.

    Attributes:
        num_messages: Messages received so far, without pure heartbeats.
        heartbeats: Has one entry per heartbeat received.
        num_streams: Streams opened so far.
        ended_streams: Has one entry per stream that has ended.
        is_silent: Set to True to stop sending heartbeats.
        holds_workers: What heartbeats say after the cell info.
        takes_work: Likewise, while it holds workers; None as a scheduler that does not know the field.
        has_trial: What heartbeats say; None as a scheduler that gives out no trials.
        is_trying: What the last message said.
        load: What every heartbeat says.
        state: What it tells.
        states_asked: Has one entry per call for the state.
        may_tell: Set while such calls are answered.
    """

    def __init__(self, cell_info: exchange_pb2.CellInfo) -> None:
        self.cell_info = cell_info
        self.num_messages = 0
        self.submits: asyncio.Queue[exchange_pb2.Submit] = asyncio.Queue()
        self.stop_ats: asyncio.Queue[exchange_pb2.StopAt] = asyncio.Queue()
        self.aborts: asyncio.Queue[int] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[None] = asyncio.Queue()
        self.is_silent = False
        self.holds_workers = True
        self.takes_work: bool | None = True
        self.has_trial: bool | None = None
        self.is_trying = False
        self.load = exchange_pb2.CellLoad()
        self.state = scheduler_pb2.GetStateResponse()
        self.states_asked: asyncio.Queue[None] = asyncio.Queue()
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        self.ended_streams: asyncio.Queue[None] = asyncio.Queue()
        self.num_streams = 0
        self._streams: list[_Stream] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        exchange_pb2_grpc.add_ExchangeServiceServicer_to_server(self, server)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    def attach(self) -> None:
        """Send the cell info, as a scheduler does once it has a worker, on the first stream that does not have it."""
        if self._last_stream.is_attached:
            self._streams.append(_Stream())
        self._last_stream.is_attached = True
        self.describe_cell()
        self._last_stream.outbox.put_nowait(self._make_heartbeat(self._last_stream))

    def describe_cell(self) -> None:
        """Send the cell info again, as a scheduler does when it has changed."""
        self._last_stream.outbox.put_nowait(exchange_pb2.ExchangeResponse(cell_info=self.cell_info))

    def send(self, *rows: Row, ends: Sequence[exchange_pb2.RequestEnd] = (), prompts: Sequence[PromptRow] = ()) -> None:
        """Send one step's outputs."""
        self.send_outputs(make_outputs(*rows, ends=ends, prompts=prompts))

    def send_outputs(self, outputs: exchange_pb2.Outputs) -> None:
        """Send prepared outputs."""
        self._last_stream.outbox.put_nowait(exchange_pb2.ExchangeResponse(outputs=outputs))

    def end_stream(self) -> None:
        """End the stream with an error that has a reason, as a scheduler does."""
        self._last_stream.end(_StreamEnd.EXPLAINED)

    def break_stream(self) -> None:
        """End the stream as a scheduler's death does."""
        self._last_stream.end(_StreamEnd.BROKEN)

    async def Exchange(
        self, request_iterator: AsyncIterator[exchange_pb2.ExchangeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[exchange_pb2.ExchangeResponse]:
        # The service may open this one before the one that it has broken ends here.
        if self.num_streams == len(self._streams):
            self._streams.append(_Stream())
        stream = self._streams[self.num_streams]
        self.num_streams += 1
        tasks = [asyncio.create_task(self._read(request_iterator)), asyncio.create_task(self._beat(stream))]
        try:
            while not isinstance(message := await stream.outbox.get(), _StreamEnd):
                yield message
            if message is _StreamEnd.EXPLAINED:
                raise NotReadyError("the scheduler is stopping")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        finally:
            for task in tasks:
                task.cancel()
            self.ended_streams.put_nowait(None)

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetStateResponse:
        self.states_asked.put_nowait(None)
        await self.may_tell.wait()
        return self.state

    async def _beat(self, stream: _Stream) -> None:
        for progress in itertools.count():
            if not self.is_silent:
                stream.outbox.put_nowait(self._make_heartbeat(stream, progress))
            await asyncio.sleep(HEARTBEAT_S)

    def _make_heartbeat(self, stream: _Stream, progress: int = 0) -> exchange_pb2.ExchangeResponse:
        holds_workers = self.holds_workers and stream.is_attached
        takes_work = None if self.takes_work is None else self.takes_work and holds_workers
        heartbeat = exchange_pb2.SchedulerHeartbeat(
            progress=progress,
            holds_workers=holds_workers,
            load=self.load,
            takes_work=takes_work,
            has_trial=self.has_trial,
        )
        return exchange_pb2.ExchangeResponse(heartbeat=heartbeat)

    @property
    def _last_stream(self) -> _Stream:
        if not self._streams or self._streams[-1].will_end:
            self._streams.append(_Stream())
        return self._streams[-1]

    async def _read(self, requests: AsyncIterator[exchange_pb2.ExchangeRequest]) -> None:
        async for request in requests:
            if request.is_heartbeat:
                self.heartbeats.put_nowait(None)
            request.ClearField("introduction")
            self.is_trying = request.is_trying
            self.num_messages += request != _HEARTBEAT
            for submit in request.submits:
                self.submits.put_nowait(submit)
            for stop_at in request.stop_ats:
                self.stop_ats.put_nowait(stop_at)
            for handle in read_column(request.abort_handles):
                self.aborts.put_nowait(handle)
