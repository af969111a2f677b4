"""The link to one scheduler's address: the only caller of ExchangeService."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol

import grpc

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from lockstep.v1 import common_pb2
from services.tokenizer.exchange.exchange_link import ExchangeLink
from services.tokenizer.exchange.request_ledger import ExchangeError
from shared.backoff import Backoff
from shared.limits import ModelLimits
from shared.network.heartbeat import LEASE_S, Silence, next_beat_at
from shared.network.rpc import Peer, make_channel, reason_of, status_from_rpc_error

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What the scheduler said about its cell."""

    scheduler_instance_id: str
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits
    default_sampling: common_pb2.SamplingParams
    exact_fingerprint: str
    """Empty if the cell is not exact."""
    weights_digest: str
    """Empty if the cell's workers do not report it."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a stream has ended."""

    reason: str
    is_unexplained: bool = False
    """Whether the scheduler gave no reason itself, and so may be dead."""


class SchedulerStream:
    """One stream to a scheduler, which holds the cell's workers or is a standby."""

    def __init__(self, sender: ExchangeLink) -> None:
        self.sender = sender
        self.cell_info: exchange_pb2.CellInfo | None = None
        self.load: exchange_pb2.CellLoad | None = None
        """How busy the cell is; None before the first heartbeat."""
        self.left: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        """How this side has ended the stream."""
        self._said_it_holds = False

    def is_alive(self, now: float) -> bool:
        """Whether the scheduler was heard within the lease, after which it may have lost its workers."""
        return now - self.sender.heard_at <= LEASE_S

    def holds_workers(self, now: float) -> bool:
        """Whether the scheduler holds workers of the cell, by its own words."""
        return self._said_it_holds and self.is_alive(now)

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
        """The scheduler has said whether it holds workers now, and how busy they are."""
        self.load = heartbeat.load
        self._said_it_holds = self.cell_info is not None and heartbeat.holds_workers

    def leave(self, reason: str) -> None:
        """End the stream from this side, soon."""
        if not self.left.done():
            self.left.set_result(StreamEnd(reason))


class StreamUser(Protocol):
    """Decides what the streams are used for."""

    def open(self) -> SchedulerStream:
        """A stream is about to be opened."""

    async def on_heard(self, stream: SchedulerStream) -> None:
        """The scheduler sent a heartbeat or its `cell_info`.

        Raises:
            ExchangeError: it cannot be used.
        """

    def on_outputs(self, stream: SchedulerStream, outputs: exchange_pb2.Outputs) -> None:
        """The scheduler sent outputs.

        Raises:
            ExchangeError: they are inconsistent.
        """

    async def on_end(self, stream: SchedulerStream, end: StreamEnd) -> None:
        """The stream has ended."""


class SchedulerLink:
    """Keeps a stream to one address, whether its scheduler holds the workers or is a standby.

    Heartbeats go both ways on either. When a stream ends, the next one is opened after a random pause, which doubles
    while the scheduler does not answer.
    """

    def __init__(self, address: str, user: StreamUser, *, silence_s: float, peer: Peer | None) -> None:
        """Prepare to link; `run` does it.

        Args:
            silence_s: A stream is given up after this silence.
            peer: As in `make_channel`.
        """
        self._address = address
        self._user = user
        self._silence_s = silence_s
        self._peer = peer
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        # Why there is no stream, so that it is logged once; None while the scheduler answers.
        self._last_reason: str | None = None

    async def run(self) -> None:
        """Open one stream after the other until cancelled."""
        while True:
            end = await self._run_stream()
            if end.reason != self._last_reason:
                logger.warning("no link to the scheduler", extra={"address": self._address, "reason": end.reason})
                self._last_reason = end.reason
            await asyncio.sleep(self._backoff.next_delay_s())

    async def _run_stream(self) -> StreamEnd:
        stream = self._user.open()
        # A channel per stream, so that no state of a lost one affects the next, and certificates are today's.
        async with make_channel(self._address, internal=True, peer=self._peer) as channel:
            call = exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange(stream.sender.messages())
            reader = asyncio.create_task(self._read(stream, call))
            end = StreamEnd("cancelled")
            try:
                end = await self._keep_alive(stream, reader)
            finally:
                reader.cancel()
                await asyncio.wait([reader])
                await self._user.on_end(stream, end)
        return end

    async def _keep_alive(self, stream: SchedulerStream, reader: asyncio.Task[StreamEnd]) -> StreamEnd:
        silence, sender = Silence(self._silence_s), stream.sender
        while not silence.beat():
            sender.beat()
            heard_at, now = sender.heard_at, time.monotonic()
            await asyncio.wait(
                [reader, stream.left], timeout=next_beat_at(now) - now, return_when=asyncio.FIRST_COMPLETED
            )
            for ended in (reader, stream.left):
                if ended.done():
                    return ended.result()
            if sender.heard_at != heard_at:
                silence.note_alive()
        return StreamEnd("the scheduler is silent", is_unexplained=True)

    async def _read(
        self,
        stream: SchedulerStream,
        call: grpc.aio.StreamStreamCall[exchange_pb2.ExchangeRequest, exchange_pb2.ExchangeResponse],
    ) -> StreamEnd:
        try:
            async for response in call:
                stream.sender.heard_at = time.monotonic()
                await self._on_response(stream, response)
        except grpc.aio.AioRpcError as error:
            # A scheduler that ends the stream on purpose gives a reason.
            is_unexplained = reason_of(status_from_rpc_error(error)) is None
            return StreamEnd(f"{error.code().name}: {error.details()}", is_unexplained)
        except ExchangeError as error:
            logger.error("the scheduler cannot be used", extra={"address": self._address, "error": str(error)})
            return StreamEnd(str(error))
        return StreamEnd("the scheduler ended the stream")

    async def _on_response(self, stream: SchedulerStream, response: exchange_pb2.ExchangeResponse) -> None:
        match response.WhichOneof("message"):
            case "cell_info":
                stream.note_cell_info(response.cell_info)
            case "heartbeat":
                stream.note_heartbeat(response.heartbeat)
            case _ if stream.cell_info is None:
                raise ExchangeError("cell_info must come before outputs")
            case _:
                self._user.on_outputs(stream, response.outputs)
                return
        await self._user.on_heard(stream)
        self._backoff.reset()
        self._last_reason = None
