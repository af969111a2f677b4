"""One `Exchange` stream to a scheduler: what is sent, what is heard, and how it ends.

The only caller of ExchangeService.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from services.tokenizer.exchange.exchange_codec import encode_handles
from services.tokenizer.exchange.request_ledger import ExchangeError
from shared.ids import RequestHandle
from shared.network.heartbeat import LEASE_S, Silence, next_beat_at
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.wire import introduce_self

# What is beyond these goes into the next message: each stays far below the limit on message size, and making and
# reading it holds no event loop, and so no heartbeat and no step, for more than milliseconds.
_SUBMIT_BYTES_PER_MESSAGE = 8 * 1024 * 1024
_SUBMITS_PER_MESSAGE = 64
_ABORTS_PER_MESSAGE = 256


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a stream has ended."""

    reason: str
    is_unexplained: bool = False
    """Whether the scheduler gave no reason itself, and so may be dead."""


class SchedulerStream:
    """One stream to a scheduler, which holds the cell's workers or is a standby.

    What is to be sent is collected while the last message is being sent. Heartbeats go both ways, to a standby too.
    """

    def __init__(
        self,
        make_submit: Callable[[RequestHandle], exchange_pb2.Submit | None],
        is_trying: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare a stream; `run` does it.

        Args:
            make_submit: Called just before a message is sent, so that ages and outputs are current; None submits
                nothing.
            is_trying: Whether this replica has suspects to try; every message says it.
        """
        # When the scheduler was last heard from, in seconds of `time.monotonic`; initially when the stream was made.
        self.heard_at = time.monotonic()
        self.cell_info: exchange_pb2.CellInfo | None = None
        self.load: exchange_pb2.CellLoad | None = None
        """How busy the cell is; None before the first heartbeat."""
        self.channel: grpc.aio.Channel | None = None
        """The connection that it is on; None before `run`."""
        self.has_trial: bool | None = None
        """Whether the scheduler lets this replica try its suspects now; None if it gives out no trials."""
        self.has_answered = False
        """Whether the scheduler has said something, and can be used."""
        self.left: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        """How this side has ended the stream."""
        self._said_it_holds = self._said_it_takes_work = False
        self._make_submit = make_submit
        self._is_trying = is_trying
        self._is_closed = False
        self._submits: deque[RequestHandle] = deque()
        self._stop_ats: list[exchange_pb2.StopAt] = []
        self._aborts: list[RequestHandle] = []
        self._is_beat_due = False
        self._is_draining = False
        self._is_introduced = False
        self._has_news = asyncio.Event()

    def is_alive(self, now: float) -> bool:
        """Whether the scheduler was heard within the lease, after which it may have lost its workers."""
        return now - self.heard_at <= LEASE_S

    def holds_workers(self, now: float) -> bool:
        """Whether the scheduler holds workers of the cell, by its own words."""
        return self._said_it_holds and self.is_alive(now)

    def takes_work(self, now: float) -> bool:
        """Whether the scheduler would have a request computed now, by its own words."""
        return self._said_it_takes_work and self.holds_workers(now)

    def note_cell_info(self, cell_info: exchange_pb2.CellInfo) -> None:
        """A scheduler has described its cell, for the first time or because it has changed.

        A heartbeat follows the first description, and says that the scheduler holds workers.

        Raises:
            ExchangeError: it is another run of the scheduler.
        """
        if self.cell_info is not None and self.cell_info.scheduler_instance_id != cell_info.scheduler_instance_id:
            raise ExchangeError("a stream has two schedulers")
        self.cell_info = cell_info

    def note_heartbeat(self, heartbeat: exchange_pb2.SchedulerHeartbeat) -> None:
        """The scheduler has said whether it holds workers now, whether they take work, and how busy they are."""
        self.load = heartbeat.load
        self._said_it_holds = self.cell_info is not None and heartbeat.holds_workers
        self.has_trial = heartbeat.has_trial if heartbeat.HasField("has_trial") else None
        self._said_it_takes_work = heartbeat.takes_work or not heartbeat.HasField("takes_work")

    def submit(self, handle: RequestHandle) -> None:
        """Send a request's submit."""
        self._submits.append(handle)
        self._has_news.set()

    def stop_at(self, handle: RequestHandle, num_tokens: int) -> None:
        """Report that a stop string ended a choice after `num_tokens` tokens."""
        self._stop_ats.append(exchange_pb2.StopAt(handle=handle, num_tokens=num_tokens))
        self._has_news.set()

    def abort(self, handle: RequestHandle) -> None:
        """Send a request's abort."""
        self._aborts.append(handle)
        self._has_news.set()

    def beat(self) -> None:
        """Send a heartbeat."""
        self._is_beat_due = True
        self._has_news.set()

    def announce_drain(self) -> None:
        """Say, now and with every later message, that this replica lets its answers finish and then ends."""
        self._is_draining = True
        self.beat()

    def close(self) -> None:
        """End `messages`."""
        self._is_closed = True
        self._has_news.set()

    def leave(self, reason: str) -> None:
        """End the stream from this side, soon."""
        if not self.left.done():
            self.left.set_result(StreamEnd(reason))

    async def run(
        self,
        channel: grpc.aio.Channel,
        *,
        silence_s: float,
        on_heard: Callable[[SchedulerStream], Awaitable[None]],
        on_outputs: Callable[[SchedulerStream, exchange_pb2.Outputs], None],
    ) -> StreamEnd:
        """Open the stream, and keep it alive until it ends; called once.

        Args:
            channel: To the scheduler.
            silence_s: The stream is given up after this silence.
            on_heard: Called after each heartbeat and each `cell_info`.
            on_outputs: Called with all outputs.

        Raises:
            ExchangeError: the scheduler violated the protocol, or one of the two raised it.
        """
        self.channel = channel
        call = exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange(self.messages())
        reader = asyncio.create_task(self._read(call, on_heard, on_outputs))
        try:
            return await self._keep_alive(reader, silence_s)
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def messages(self) -> AsyncIterator[exchange_pb2.ExchangeRequest]:
        """What to send until closed; each message holds everything since the last one."""
        while True:
            await self._has_news.wait()
            if self._is_closed:
                return
            message = self._take_message()
            # It is empty if all requests to be submitted have ended.
            if message.submits or message.stop_ats or message.abort_handles or message.is_heartbeat:
                if not self._is_introduced:
                    message.MergeFrom(exchange_pb2.ExchangeRequest(introduction=introduce_self().encode()))
                    self._is_introduced = True
                yield message

    async def _keep_alive(self, reader: asyncio.Task[StreamEnd], silence_s: float) -> StreamEnd:
        silence = Silence(silence_s)
        while not silence.beat():
            self.beat()
            heard_at, now = self.heard_at, time.monotonic()
            await asyncio.wait(
                [reader, self.left], timeout=next_beat_at(now) - now, return_when=asyncio.FIRST_COMPLETED
            )
            for ended in (reader, self.left):
                if ended.done():
                    return ended.result()
            if self.heard_at != heard_at:
                silence.note_alive()
        return StreamEnd("the scheduler is silent", is_unexplained=True)

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall[exchange_pb2.ExchangeRequest, exchange_pb2.ExchangeResponse],
        on_heard: Callable[[SchedulerStream], Awaitable[None]],
        on_outputs: Callable[[SchedulerStream, exchange_pb2.Outputs], None],
    ) -> StreamEnd:
        try:
            async for response in call:
                self.heard_at = time.monotonic()
                match response.WhichOneof("message"):
                    case "cell_info":
                        self.note_cell_info(response.cell_info)
                    case "heartbeat":
                        self.note_heartbeat(response.heartbeat)
                    case _ if self.cell_info is None:
                        raise ExchangeError("cell_info must come before outputs")
                    case _:
                        on_outputs(self, response.outputs)
                        continue
                await on_heard(self)
                self.has_answered = True
        except grpc.aio.AioRpcError as error:
            # A scheduler that ends the stream on purpose gives a reason.
            is_unexplained = reason_of(status_from_rpc_error(error)) is None
            return StreamEnd(f"{error.code().name}: {error.details()}", is_unexplained)
        return StreamEnd("the scheduler ended the stream")

    def _take_message(self) -> exchange_pb2.ExchangeRequest:
        message = exchange_pb2.ExchangeRequest(
            stop_ats=self._stop_ats,
            abort_handles=encode_handles(self._aborts[:_ABORTS_PER_MESSAGE]),
            is_heartbeat=self._is_beat_due,
            is_draining=self._is_draining,
            is_trying=self._is_trying(),
        )
        self._stop_ats, self._aborts, self._is_beat_due = [], self._aborts[_ABORTS_PER_MESSAGE:], False
        num_bytes = 0
        for _ in range(min(len(self._submits), _SUBMITS_PER_MESSAGE)):
            if num_bytes >= _SUBMIT_BYTES_PER_MESSAGE:
                break
            submit = self._make_submit(self._submits.popleft())
            if submit is not None:
                num_bytes += submit.ByteSize()
                message.submits.append(submit)
        if not self._submits and not self._aborts:
            self._has_news.clear()
        return message
