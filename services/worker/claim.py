"""Who holds the worker: one epoch at a time, and the streams on which its steps come.

Belongs to the RPC thread's event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.worker.step import StepOutput


class Claim:
    """One epoch, from its Attach until its steps' stream ends or a later Attach supersedes it.

    `ready` ends when the device holds the epoch's empty batch; its result is the last step launched before.
    """

    def __init__(self, epoch: int, scheduler_instance_id: str, ready: asyncio.Future[int]) -> None:
        self.epoch = epoch
        self.scheduler_instance_id = scheduler_instance_id
        self.ready = ready
        ready.add_done_callback(_retrieve)
        self.is_over = False
        self.next_step_id = 1
        self._streams: set[StepStream] = set()
        # An opened stream says nothing about its epoch. The one that brings the first step is the epoch's.
        self._stepping: StepStream | None = None

    @property
    def is_held(self) -> bool:
        """Whether somebody has a stream open."""
        return bool(self._streams)

    def open_stream(self) -> StepStream:
        """Add a stream."""
        stream = StepStream(self)
        self._streams.add(stream)
        return stream

    def try_bind(self, stream: StepStream) -> bool:
        """Make `stream` the one that the epoch's steps come on; False when another one is."""
        self._stepping = self._stepping or stream
        return self._stepping is stream

    def release(self, stream: StepStream) -> None:
        """Take a stream away that ended; the claim ends with the one its steps came on."""
        self._streams.discard(stream)
        if self._stepping is stream:
            self.is_over = True

    def supersede(self) -> None:
        """End the claim and its streams: no step of it is launched from now on."""
        self.is_over = True
        for stream in list(self._streams):
            stream.cut()


class StepStream:
    """The steps of one Execute stream that were launched and not answered, in order."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self._steps: asyncio.Queue[asyncio.Future[StepOutput] | None] = asyncio.Queue()
        self._pending: set[asyncio.Future[StepOutput]] = set()
        self._reader: asyncio.Task[None] | None = None

    def read_by(self, reader: asyncio.Task[None]) -> None:
        """Let `reader` add the steps; `next_step` ends after the last one when it is done."""
        self._reader = reader
        reader.add_done_callback(_retrieve)
        reader.add_done_callback(lambda _: self._steps.put_nowait(None))

    def add(self, step: asyncio.Future[StepOutput]) -> None:
        """Append a step that was given to the device."""
        self._pending.add(step)
        step.add_done_callback(self._pending.discard)
        step.add_done_callback(_retrieve)
        self._steps.put_nowait(step)

    async def next_step(self) -> asyncio.Future[StepOutput] | None:
        """The next step in order, whose result may still have to come; None after the last one."""
        return await self._steps.get()

    def cut(self) -> None:
        """Drop the steps that are not launched yet and everything that would come; whoever waits is cancelled."""
        for step in list(self._pending):
            step.cancel()
        if self._reader is not None:
            self._reader.cancel()

    def close(self) -> None:
        """The RPC has ended: cut, and let go of the claim."""
        self.cut()
        self.claim.release(self)


def _retrieve(future: asyncio.Future[Any]) -> None:
    # Nobody has to wait for it: without this, asyncio would log an error that the stream's end has told already.
    if not future.cancelled():
        future.exception()
