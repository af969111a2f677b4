"""The live requests of one replica, with all that another scheduler needs to go on with them.

Pure: no I/O, and no clock but the `now` it is passed, so that recovery can be simulated from one seed. Times are
seconds of one monotonic clock.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field

import numpy as np

from shared.errors import DeadlinePassedError, SchedulerLostError, ServiceError
from shared.limits import TOKEN_DTYPE, SamplingParams


class ExchangeError(Exception):
    """The scheduler sent what no scheduler sends."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with a prompt of ids and every parameter resolved, the seed too; it fits the cell.

    `prompt` is little-endian int32, `priority` a `lockstep.v1.Priority`.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request; `number` counts them from 1, on whatever stream.

    `output` are the completion tokens so far, little-endian int32. `age_s` is how long ago the request arrived,
    `time_left_s` how long its caller still waits; None is for ever.
    """

    handle: int
    request: ResolvedRequest
    number: int
    output: bytes
    age_s: float
    time_left_s: float | None


@dataclass(slots=True)
class _LiveRequest:
    request: ResolvedRequest
    arrived_s: float
    deadline_s: float | None
    num_attempts: int = 0
    stream: int | None = None
    """The present stream when it was submitted there."""
    has_begun: bool = False
    output: array[int] = field(default_factory=lambda: array("i"))


class RequestLedger:
    """Knows what each request has been told, and what to tell a fresh stream.

    There is at most one present stream; what comes on an older one is dropped. A handle names a request on every
    stream it is submitted on.

    Invariant: a request is here from `add` until its one end: by `end`, `expire`, `remove` or `remove_all`. It is in
    `_unsent` exactly while the scheduler at the end of the present stream has not been sent it.
    """

    def __init__(self, lost_after_s: float, now: float) -> None:
        """Begin without a request and without a stream.

        Args:
            lost_after_s: How long requests wait for a stream.
            now: When that begins to count.
        """
        self._lost_after_s = lost_after_s
        self._without_stream_since: float | None = now
        self._stream = 0
        self._handles = itertools.count(1)
        self._requests: dict[int, _LiveRequest] = {}
        self._unsent: dict[int, _LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: ResolvedRequest, *, arrived_s: float, deadline_s: float | None) -> int:
        """Take in a request, and return the handle that names it from now on; `next_attempt` submits it."""
        handle = next(self._handles)
        self._requests[handle] = self._unsent[handle] = _LiveRequest(request, arrived_s, deadline_s)
        return handle

    def open_stream(self) -> tuple[int, list[int]]:
        """A fresh stream is the present one.

        Returns:
            Its number, and the handles to submit on it in this order: who has tokens goes first, then by age.
        """
        self._detach()
        self._without_stream_since = None
        self._stream += 1
        order = sorted(self._requests, key=lambda handle: _resubmission_order(self._requests[handle], handle))
        return self._stream, order

    def lose_stream(self, stream: int, now: float) -> None:
        """A stream has ended: its requests wait for the next one. Nothing changes unless it is the present one."""
        if stream == self._stream and self._without_stream_since is None:
            self._detach()
            self._without_stream_since = now

    def next_attempt(self, handle: int, now: float) -> Attempt | None:
        """Submit a request on the present stream, once.

        Returns:
            What to send; None when the request has ended, was submitted on this stream before, or there is none.
        """
        if self._without_stream_since is not None or handle not in self._unsent:
            return None
        live = self._unsent.pop(handle)
        live.stream = self._stream
        live.num_attempts += 1
        return Attempt(
            handle,
            live.request,
            live.num_attempts,
            np.array(live.output, TOKEN_DTYPE).tobytes(),
            now - live.arrived_s,
            None if live.deadline_s is None else live.deadline_s - now,
        )

    def begin(self, stream: int, handle: int) -> bool:
        """A request's first tokens are about to come; returns whether that is news."""
        live = self._requests.get(handle)
        if live is None or live.stream != stream or live.has_begun:
            return False
        live.has_begun = True
        return True

    def receive(self, stream: int, handle: int, first_index: int, token_ids: list[int]) -> list[int]:
        """Take completion tokens, the first of which has the index `first_index`.

        Returns:
            Those that are new; none when the request has ended, or `stream` is not the one it was last submitted on.

        Raises:
            ExchangeError: tokens before them are missing.
        """
        live = self._requests.get(handle)
        if live is None or live.stream != stream:
            return []
        num_known = len(live.output) - first_index
        if num_known < 0:
            raise ExchangeError("tokens are missing")
        if num_known:
            token_ids = token_ids[num_known:]
        live.output.fromlist(token_ids)
        return token_ids

    def end(self, stream: int, handle: int) -> bool:
        """The scheduler ended a request; returns whether that was its end."""
        live = self._requests.get(handle)
        if live is None or live.stream != stream:
            return False
        del self._requests[handle]
        return True

    def remove(self, handle: int) -> bool:
        """End a request from this side: its client is gone, or has all it wants. Nothing happens when it has ended.

        Returns:
            Whether the scheduler at the other end of the present stream has it, and is to be told.
        """
        live = self._requests.pop(handle, None)
        self._unsent.pop(handle, None)
        return live is not None and live.stream is not None

    def remove_all(self) -> list[int]:
        """End all requests from this side; returns their handles."""
        handles = list(self._requests)
        self._requests.clear()
        self._unsent.clear()
        return handles

    def expire(self, now: float) -> list[tuple[int, ServiceError]]:
        """End requests that no scheduler has and whose time is up, and return their handles with the errors.

        The scheduler keeps the deadlines of those that it has.
        """
        since = self._without_stream_since
        if since is not None and now - since >= self._lost_after_s:
            return [(handle, SchedulerLostError("the cell's scheduler was lost")) for handle in self.remove_all()]
        passed = [
            handle for handle, live in self._unsent.items() if live.deadline_s is not None and live.deadline_s <= now
        ]
        for handle in passed:
            del self._requests[handle], self._unsent[handle]
        return [(handle, DeadlinePassedError("the deadline passed before the request ended")) for handle in passed]

    def next_wakeup(self) -> float | None:
        """When `expire` has something to do at the earliest; None while nothing can expire."""
        if not self._unsent:
            return None
        times = [live.deadline_s for live in self._unsent.values() if live.deadline_s is not None]
        if self._without_stream_since is not None:
            times.append(self._without_stream_since + self._lost_after_s)
        return min(times, default=None)

    def _detach(self) -> None:
        """No request is on a stream any more."""
        for live in self._requests.values():
            live.stream = None
        self._unsent = dict(self._requests)


def _resubmission_order(live: _LiveRequest, handle: int) -> tuple[bool, float, int]:
    return not live.output, live.arrived_s, handle
