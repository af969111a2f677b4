"""Writes the responses of a call whose client may stop reading."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from shared.errors import ClientTooSlowError


def call_is_over() -> asyncio.CancelledError:
    """What to raise when gRPC cannot send anything to a call's client.

    Its deadline has passed, or it is gone: gRPC cancels the handler, perhaps a moment later than a write fails.
    """
    return asyncio.CancelledError("the call is over")


class ResponseWriter:
    """The call fails if its client reads nothing for too long.

    HTTP/2's flow-control windows (64 KiB at the client, plus what its library reads ahead) absorb small responses, so a
    write first blocks long after the client stopped reading. Only this call waits: its producer merges what
    accumulates.

    Every token passes here, and `asyncio.timeout` costs a third of a write: one timer watches all writes of the call.
    """

    def __init__(self, context: grpc.aio.ServicerContext, max_unread_s: float) -> None:
        """Each write may take at most `max_unread_s`. Must be entered by the task that writes."""
        self._context = context
        self._max_unread_s = max_unread_s
        self._loop = asyncio.get_running_loop()
        # When the current write began, in the loop's time; None between writes.
        self._began_at: float | None = None
        self._is_too_slow = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a writer is used by a task"
        self._task = task
        self._timer = self._loop.call_later(self._max_unread_s, self._watch)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()

    async def write(self, response: Any) -> None:
        """Write a response; returns once it has left this process.

        Raises:
            CancelledError: the call is over.
            ClientTooSlowError: the client read nothing for too long. It receives this after the unread responses.
        """
        self._began_at = self._loop.time()
        try:
            await self._context.write(response)
        except asyncio.CancelledError as error:
            # Unless the call was cancelled, too.
            if self._is_too_slow and self._task.uncancel() == 0:
                raise ClientTooSlowError("the client did not read its response for too long") from error
            raise
        except grpc.aio.InternalError as error:
            raise call_is_over() from error
        finally:
            self._began_at = None

    def _watch(self) -> None:
        """Cancel a write that takes too long; else look again when the current one, or one that begins now, would."""
        now = self._loop.time()
        ends_at = (now if self._began_at is None else self._began_at) + self._max_unread_s
        if ends_at <= now:
            self._is_too_slow = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(ends_at, self._watch)
