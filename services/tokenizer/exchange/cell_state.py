"""The cell's state, as its scheduler tells it to operators of the HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.errors import NotReadyError

_DEADLINE_S = 5.0

State = scheduler_pb2.GetStateResponse


class CellState:
    """Asks the linked scheduler, once however many ask at the same moment."""

    def __init__(self, find_channel: Callable[[], grpc.aio.Channel]) -> None:
        """`find_channel` returns the connection to the linked scheduler, or raises `NotReadyError`."""
        self._find_channel = find_channel
        self._asking: asyncio.Task[State] | None = None

    async def read(self) -> State:
        """The state; what asks while a call is open gets that one's, and may leave without ending it.

        Raises:
            NotReadyError: there is no link, or the scheduler does not answer.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(self._find_channel()))
            self._asking.add_done_callback(self._note_end)
        return await asyncio.shield(self._asking)

    async def _ask(self, channel: grpc.aio.Channel) -> State:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.GetState(scheduler_pb2.GetStateRequest(), timeout=_DEADLINE_S)
        # The end of the link cancels the call, which then raises what cancels a task.
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise NotReadyError("the scheduler does not tell the cell's state", code=code.name)
        state: State = await call
        return state

    def _note_end(self, task: asyncio.Task[State]) -> None:
        self._asking = None
        if not task.cancelled():
            # Seen here if all that have asked are gone.
            task.exception()
