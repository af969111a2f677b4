"""An epoch's streams of steps."""

from __future__ import annotations

import asyncio
from typing import Any

from services.worker.runner.cache_room import CacheRoom
from services.worker.server.claim import AdmittedStep
from shared.step.step import StepResult


class Epoch:
    """One epoch, from its Attach until a later one supersedes it.

    `ready` completes with the room for KV and states when the group holds its empty batch.
    """

    def __init__(self, number: int, ready: asyncio.Future[CacheRoom], last_admitted: AdmittedStep) -> None:
        """`last_admitted`: the last step of earlier epochs."""
        self.number = number
        self.ready = ready
        self.last_admitted = last_admitted
        ready.add_done_callback(retrieve)
        self._streams: set[StepStream] = set()

    @property
    def has_streams(self) -> bool:
        """Whether any stream is open."""
        return bool(self._streams)

    def open_stream(self, number: int) -> StepStream:
        """Open a stream of steps."""
        stream = StepStream(number)
        self._streams.add(stream)
        return stream

    def close_stream(self, stream: StepStream) -> None:
        """Remove a stream after its RPC has ended."""
        stream.cut()
        self._streams.discard(stream)

    def supersede(self) -> None:
        """End the streams; their steps are no longer launched."""
        for stream in self._streams:
            stream.cut()


class StepStream:
    """Steps of one Execute stream, submitted and not yet answered, in order."""

    def __init__(self, number: int) -> None:
        """`number` identifies the stream in the claim ledger."""
        self.number = number
        self.steps: asyncio.Queue[asyncio.Future[StepResult] | None] = asyncio.Queue()
        """The steps that were added, possibly still running; None after the last one."""
        self._pending: set[asyncio.Future[StepResult]] = set()
        self._reader: asyncio.Task[None] | None = None

    def read_by(self, reader: asyncio.Task[None]) -> None:
        """Set the task that adds steps."""
        self._reader = reader
        reader.add_done_callback(retrieve)
        reader.add_done_callback(lambda _: self.steps.put_nowait(None))

    def add(self, step: asyncio.Future[StepResult]) -> None:
        """Append a step given to the device, as `DeviceSteps.submit` returned it."""
        self._pending.add(step)
        step.add_done_callback(self._pending.discard)
        self.steps.put_nowait(step)

    async def finish(self) -> None:
        """Wait for the reader.

        Raises:
            ServiceError: the last message was refused.
        """
        assert self._reader is not None, "the stream has no reader"
        await self._reader

    def cut(self) -> None:
        """Cancel the reader and the pending steps; one that the device has begun is still computed."""
        for step in list(self._pending):
            step.cancel()
        if self._reader is not None:
            self._reader.cancel()


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved: it was reported elsewhere, and asyncio would log it again."""
    if not future.cancelled():
        future.exception()
