"""The live requests of one replica, with all that another scheduler needs to go on with them.

Pure: no I/O, and no clock but the `now` it is passed, so that recovery can be simulated from one seed. Times are
seconds of one monotonic clock.
"""

from __future__ import annotations

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

    `prompt` is little-endian int32, `priority` a `lockstep.v1.Priority`, `n` the number of choices.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""
    n: int = 1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What is known of one choice: its completion tokens, little-endian int32, and whether it has ended."""

    output: bytes
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request; `number` counts them from 1, on whatever stream.

    `choices_so_far` has nothing, or an entry a choice. `age_s` is how long ago the request arrived, `time_left_s` how
    long its caller still waits; None is for ever.
    """

    handle: int
    request: ResolvedRequest
    number: int
    choices_so_far: tuple[ChoiceSoFar, ...]
    age_s: float
    time_left_s: float | None


@dataclass(slots=True)
class _LiveRequest:
    request: ResolvedRequest
    handle: int
    arrived_s: float
    deadline_s: float | None
    choices: list[_LiveChoice] = field(default_factory=list)
    num_attempts: int = 0
    stream: int | None = None
    """The present stream when it was submitted there."""
    num_prompt_positions: int = 1
    """Positions of the prompt whose log-probabilities are known. The first has none."""

    @property
    def has_news(self) -> bool:
        """Whether anything is known of a choice."""
        return any(choice.output or choice.has_ended for choice in self.choices)


@dataclass(slots=True)
class _LiveChoice:
    request: _LiveRequest
    has_begun: bool = False
    has_ended: bool = False
    output: array[int] = field(default_factory=lambda: array("i"))


class RequestLedger:
    """Knows what each request has been told, and what to tell a fresh stream.

    There is at most one present stream; what comes on an older one is dropped. A handle names a choice on every
    stream that its request is submitted on. A request of n choices has n handles in a row, and goes by the first.

    Invariant: a choice is here from `add` until its one end: by `end`, `stop`, `expire`, `remove` or `remove_all`; a
    request until the last of its choices has ended. It is in `_unsent` exactly while the scheduler at the end of the
    present stream has not been sent it.
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
        self._next_handle = 1
        self._choices: dict[int, _LiveChoice] = {}
        self._requests: dict[int, _LiveRequest] = {}
        self._unsent: dict[int, _LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: ResolvedRequest, *, arrived_s: float, deadline_s: float | None) -> int:
        """Take in a request, and return the handle of its first choice; `next_attempt` submits it."""
        handle = self._next_handle
        self._next_handle += request.n
        live = _LiveRequest(request, handle, arrived_s, deadline_s)
        live.choices = [_LiveChoice(live) for _ in range(request.n)]
        self._requests[handle] = self._unsent[handle] = live
        self._choices.update(enumerate(live.choices, handle))
        return handle

    def open_choices(self, handle: int) -> list[int]:
        """The handles of a request's choices that have not ended; none when it has ended."""
        live = self._requests.get(handle)
        if live is None:
            return []
        return [number for number, choice in enumerate(live.choices, handle) if not choice.has_ended]

    def open_stream(self) -> tuple[int, list[int]]:
        """A fresh stream is the present one.

        Returns:
            Its number, and the handles to submit on it in this order: who has tokens goes first, then by age.
        """
        self._detach()
        self._without_stream_since = None
        self._stream += 1
        order = sorted(self._requests, key=lambda handle: _resubmission_order(self._requests[handle]))
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
            _choices_so_far(live),
            now - live.arrived_s,
            None if live.deadline_s is None else live.deadline_s - now,
        )

    def begin(self, stream: int, handle: int) -> bool:
        """A choice's first tokens are about to come; returns whether that is news."""
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream or choice.has_begun:
            return False
        choice.has_begun = True
        return True

    def receive(self, stream: int, handle: int, first_index: int, token_ids: list[int]) -> list[int]:
        """Take completion tokens of a choice, the first of which has the index `first_index`.

        Returns:
            Those that are new; none when it has ended, or `stream` is not the one it was last submitted on.

        Raises:
            ExchangeError: tokens before them are missing.
        """
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream:
            return []
        num_known = len(choice.output) - first_index
        if num_known < 0:
            raise ExchangeError("tokens are missing")
        if num_known:
            token_ids = token_ids[num_known:]
        choice.output.fromlist(token_ids)
        return token_ids

    def receive_prompt(self, stream: int, handle: int, first_position: int, num_positions: int) -> int:
        """Take what is known of a request's prompt at so many positions in a row.

        Returns:
            How many of them are new, the last ones; none when it has ended, or `stream` is not the one it was last
            submitted on.

        Raises:
            ExchangeError: positions before them are missing.
        """
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream:
            return 0
        live = choice.request
        if first_position > live.num_prompt_positions:
            raise ExchangeError("positions of the prompt are missing")
        num_new = max(0, first_position + num_positions - live.num_prompt_positions)
        live.num_prompt_positions += num_new
        return num_new

    def end(self, stream: int, handle: int) -> bool:
        """The scheduler ended a choice; returns whether that was its end."""
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream:
            return False
        self._end(handle)
        return True

    def stop(self, handle: int) -> bool:
        """End a choice from this side: its client has all it wants. Nothing happens when it has ended.

        Returns:
            As `remove`.
        """
        if handle not in self._choices:
            return False
        return self._end(handle).stream is not None

    def remove(self, handle: int) -> bool:
        """End a request from this side: its client is gone. Nothing happens when it has ended.

        Returns:
            Whether the scheduler at the other end of the present stream has it, and is to be told.
        """
        live = self._requests.get(handle)
        for number in self.open_choices(handle):
            self._end(number)
        return live is not None and live.stream is not None

    def remove_all(self) -> list[int]:
        """End all requests from this side; returns the handles of their choices that had not ended."""
        handles = list(self._choices)
        self._choices.clear()
        self._requests.clear()
        self._unsent.clear()
        return handles

    def expire(self, now: float) -> list[tuple[int, ServiceError]]:
        """End requests that no scheduler has and whose time is up.

        The scheduler keeps the deadlines of those that it has.

        Returns:
            The handles of their choices that had not ended, with the errors.
        """
        since = self._without_stream_since
        if since is not None and now - since >= self._lost_after_s:
            return [(handle, SchedulerLostError("the cell's scheduler was lost")) for handle in self.remove_all()]
        late = [
            handle for handle, live in self._unsent.items() if live.deadline_s is not None and live.deadline_s <= now
        ]
        passed = [choice for handle in late for choice in self.open_choices(handle)]
        for choice in passed:
            self._end(choice)
        return [(choice, DeadlinePassedError("the deadline passed before the request ended")) for choice in passed]

    def next_wakeup(self) -> float | None:
        """When `expire` has something to do at the earliest; None while nothing can expire."""
        if not self._unsent:
            return None
        times = [live.deadline_s for live in self._unsent.values() if live.deadline_s is not None]
        if self._without_stream_since is not None:
            times.append(self._without_stream_since + self._lost_after_s)
        return min(times, default=None)

    def _end(self, handle: int) -> _LiveRequest:
        """A choice ends, and with the last one its request; returns the request."""
        choice = self._choices.pop(handle)
        choice.has_ended = True
        live = choice.request
        if all(other.has_ended for other in live.choices):
            del self._requests[live.handle]
            self._unsent.pop(live.handle, None)
            # They hold each other; this way they need no garbage collector.
            live.choices = []
        return live

    def _detach(self) -> None:
        """No request is on a stream any more."""
        for live in self._requests.values():
            live.stream = None
        self._unsent = dict(self._requests)


def _choices_so_far(live: _LiveRequest) -> tuple[ChoiceSoFar, ...]:
    if not live.has_news:
        return ()
    return tuple(
        ChoiceSoFar(np.array(choice.output, TOKEN_DTYPE).tobytes(), choice.has_ended) for choice in live.choices
    )


def _resubmission_order(live: _LiveRequest) -> tuple[bool, float, int]:
    return not live.has_news, live.arrived_s, live.handle
