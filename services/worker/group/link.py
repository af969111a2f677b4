"""What both ends of a link inside a failure domain share."""

from __future__ import annotations

import asyncio
import enum
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from lockstep.internal.v1 import worker_pb2
from services.worker.layout import RankLayout
from shared.network.heartbeat import Silence, next_beat_at
from shared.step.step import StepResult

logger = logging.getLogger(__name__)

# Time for a partner to read our goodbye.
_GOODBYE_S = 0.3

MessageT = TypeVar("MessageT")


class LinkEnd(enum.Enum):
    """How a link ended."""

    CLOSED = "closed"
    """This process was asked to end."""
    LEFT = "left"
    """The partner was asked to end, and said goodbye."""
    BROKEN = "broken"
    SILENT = "silent"


class Link(Generic[MessageT]):
    """One end of a Join stream: sends in order without blocking, and notices a silent partner."""

    def __init__(self, make_heartbeat: Callable[[], MessageT], goodbye: MessageT, silence_s: float) -> None:
        """`goodbye` is sent if asked to end; a partner silent for `silence_s` ends the link."""
        self._make_heartbeat = make_heartbeat
        self._goodbye = goodbye
        self._silence = Silence(silence_s)
        self._outbox: asyncio.Queue[MessageT] = asyncio.Queue()

    def send(self, message: MessageT) -> None:
        """Queue a message."""
        self._outbox.put_nowait(message)

    def note_alive(self) -> None:
        """Record a sign of life."""
        self._silence.note_alive()

    async def run(
        self,
        write: Callable[[MessageT], Awaitable[object]],
        read: Coroutine[Any, Any, bool],
        leaving: asyncio.Event,
        closing: asyncio.Event,
    ) -> LinkEnd:
        """Keep the link open until it ends.

        Args:
            read: Handles messages until the stream ends; whether the partner said goodbye.
            leaving: Set when the domain is asked to end, which a heartbeat says at once.
            closing: Set when this process is asked to end.
        """
        # A failed write alone does not end the link: the read that fails with it tells more.
        writing = asyncio.create_task(self._write_all(write))
        writing.add_done_callback(_take_error)
        reading, watching = asyncio.create_task(read), asyncio.create_task(self._beat())
        announcing = asyncio.create_task(self._beat_once(leaving))
        parting = asyncio.create_task(self._part(closing, reading))
        try:
            await asyncio.wait({reading, watching, parting}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # gRPC cancels a call's handler when the connection is gone.
            return LinkEnd.CLOSED if closing.is_set() else LinkEnd.BROKEN
        finally:
            for task in (writing, reading, watching, announcing, parting):
                task.cancel()
        if closing.is_set():
            return LinkEnd.CLOSED
        if reading.done() and _take_error(reading) is None and reading.result():
            return LinkEnd.LEFT
        return LinkEnd.SILENT if watching.done() else LinkEnd.BROKEN

    async def _beat(self) -> None:
        while not self._silence.beat():
            self.send(self._make_heartbeat())
            # The monotonic clock, which all processes on a machine share.
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(next_beat_at(now) - now)

    async def _beat_once(self, leaving: asyncio.Event) -> None:
        await leaving.wait()
        self.send(self._make_heartbeat())

    async def _part(self, closing: asyncio.Event, reading: asyncio.Task[bool]) -> None:
        await closing.wait()
        self.send(self._goodbye)
        # The partner ends the stream once it has read the goodbye; if we ended it sooner, the message would be lost.
        await asyncio.wait({reading}, timeout=_GOODBYE_S)

    async def _write_all(self, write: Callable[[MessageT], Awaitable[object]]) -> None:
        while True:
            await write(await self._outbox.get())


def checksum(output: StepResult) -> int:
    """CRC-32 of drawn tokens and counts in wire format; equal on all ranks of a group."""
    tokens = zlib.crc32(output.token_ids.astype("<i4", copy=False).tobytes())
    return tokens if output.counts is None else zlib.crc32(output.counts.astype("<i4", copy=False).tobytes(), tokens)


def to_layout_message(layout: RankLayout) -> worker_pb2.RankLayout:
    """Encode a layout."""
    return worker_pb2.RankLayout(
        dp_rank=None if layout.fits_any_place else layout.dp_rank,
        dp_size=layout.dp_size,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        has_expert_parallel=layout.has_expert_parallel,
    )


def parse_layout(message: worker_pb2.RankLayout) -> RankLayout:
    """Decode a layout."""
    return RankLayout(
        message.dp_rank,
        message.dp_size,
        message.tp_rank,
        message.tp_size,
        message.has_expert_parallel,
        fits_any_place=not message.HasField("dp_rank"),
    )


def _take_error(task: asyncio.Task[Any]) -> BaseException | None:
    """A finished task's exception; logged unless only the connection is gone."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(
        error, grpc.aio.AioRpcError | grpc.aio.UsageError | asyncio.InvalidStateError
    ):
        logger.error("a link inside the domain failed", exc_info=error)
    return error
