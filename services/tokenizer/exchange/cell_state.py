"""The cell's state, as its scheduler tells it on the HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.errors import NotReadyError

_DEADLINE_S = 5.0
# Below the second after which pages ask again, so that one page alone always gets a new state.
MAX_AGE_S = 0.9

State = scheduler_pb2.GetStateResponse


@dataclass(frozen=True, slots=True)
class _Told:
    """What a scheduler told last."""

    channel: grpc.aio.Channel
    asked_at: float
    state: State


class CellState:
    """Asks the linked scheduler: once in `max_age_s` however many ask, and never unasked."""

    def __init__(self, find_channel: Callable[[], grpc.aio.Channel], max_age_s: float = MAX_AGE_S) -> None:
        """`find_channel` returns the connection to the linked scheduler, or raises `NotReadyError`."""
        self._find_channel = find_channel
        self._max_age_s = max_age_s
        self._asking: asyncio.Task[State] | None = None
        self._last: _Told | None = None

    async def read(self) -> State:
        """The state, which callers share: not to be changed.

        What asks while a call is open gets that one's, and may leave without ending it.

        Raises:
            NotReadyError: there is no link, or the scheduler does not answer.
        """
        if self._asking is None:
            channel, last = self._find_channel(), self._last
            now = asyncio.get_running_loop().time()
            if last is not None and last.channel is channel and now < last.asked_at + self._max_age_s:
                return last.state
            self._asking = asyncio.create_task(self._ask(channel, now))
            self._asking.add_done_callback(self._note_end)
        return await asyncio.shield(self._asking)

    async def _ask(self, channel: grpc.aio.Channel, now: float) -> State:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.GetState(scheduler_pb2.GetStateRequest(), timeout=_DEADLINE_S)
        # The end of the link cancels the call, which then raises what cancels a task.
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise NotReadyError("the scheduler does not tell the cell's state", code=code.name)
        state: State = await call
        self._last = _Told(channel, now, state)
        return state

    def _note_end(self, task: asyncio.Task[State]) -> None:
        self._asking = None
        if not task.cancelled():
            # Seen here if all that have asked are gone.
            task.exception()
