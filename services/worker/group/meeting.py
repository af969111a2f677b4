"""A process's meeting with the leader that it will join: how it learns of this start of the failure domain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from shared.backoff import Backoff

logger = logging.getLogger(__name__)

# Between attempts: names may take 30 s to resolve, and a leader that restarts seconds to answer.
_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 2.0

_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

Connect = Callable[[], AbstractAsyncContextManager[grpc.aio.Channel]]


class NotMetError(Exception):
    """The leader did not answer in time, or one's own address did not become usable; the message says why."""


class Retries:
    """The pauses between attempts, until the time to meet is over."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """`what` is tried."""
        self._what = what
        self._timeout_s = timeout_s
        self.ends_at = asyncio.get_running_loop().time() + timeout_s
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        self._last_problem: str | None = None

    async def wait(self, problem: str) -> None:
        """Wait for the next attempt after this problem, which is logged when it changes.

        Raises:
            NotMetError: the time is over.
        """
        delay_s = self._backoff.next_delay_s()
        if asyncio.get_running_loop().time() + delay_s > self.ends_at:
            raise NotMetError(f"cannot {self._what} within {self._timeout_s:g} s: {problem}")
        if problem != self._last_problem:
            logger.warning("cannot %s yet", self._what, extra={"error": problem})
            self._last_problem = problem
        await asyncio.sleep(delay_s)


def is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Whether a leader is not there, or ended; all else is a refusal."""
    return error.code() in _GONE


@dataclass(frozen=True, slots=True)
class Meeting:
    """A leader that answered, on a channel of its own."""

    channel: grpc.aio.Channel
    answer: worker_pb2.MeetResponse
    call: Any

    async def wait_until_lost(self) -> None:
        """Return when the leader is gone."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass


@asynccontextmanager
async def meet(connect: Connect, request: worker_pb2.MeetRequest, retries: Retries) -> AsyncIterator[Meeting]:
    """Ask the leader until it answers; the channel is open until the block ends.

    Each attempt has a channel of its own: it resolves the name again, with the certificates of the day.

    Raises:
        NotMetError: there was no answer in time.
        AioRpcError: the leader refuses the process.
    """
    while True:
        async with connect() as channel:
            call = worker_pb2_grpc.GroupServiceStub(channel).Meet(request)
            try:
                async with asyncio.timeout_at(retries.ends_at):
                    answer = await call.read()
                problem = "it ended" if answer is grpc.aio.EOF else None
            except TimeoutError:
                problem = "it does not answer"
            except grpc.aio.AioRpcError as error:
                if not is_gone(error):
                    raise
                problem = str(error.details())
            if problem is None:
                yield Meeting(channel, answer, call)
                return
        await retries.wait(problem)
