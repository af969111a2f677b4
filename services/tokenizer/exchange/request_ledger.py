"""The live requests of one replica, with all that another scheduler needs to go on with them.

Pure: no I/O, and no clock but the `now` it is passed, so that recovery can be simulated from one seed. Times are
seconds of one monotonic clock.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from services.tokenizer.exchange.submit_suspects import SubmitSuspects
from services.tokenizer.request.resolved_request import Attempt, ChoiceSoFar, ResolvedRequest
from shared.errors import (
    DeadlinePassedError,
    ExactUnavailableError,
    PoisonRequestError,
    SchedulerLostError,
    ServiceError,
)
from shared.limits import TOKEN_DTYPE


class ExchangeError(Exception):
    """The scheduler sent what no scheduler sends."""


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
    awaits_token: bool = False
    """Whether no token has come since it was submitted."""
    exact_fingerprint: str | None = None
    """That of all cells it was submitted to; empty when there is none such, None before the first."""
    num_prompt_positions: int = 1
    """Positions of the prompt whose log-probabilities are known. The first has none."""

    @property
    def choices_so_far(self) -> tuple[ChoiceSoFar, ...]:
        """What is known of each choice; empty when that is nothing."""
        if not self._has_news:
            return ()
        return tuple(
            ChoiceSoFar(np.array(choice.output, TOKEN_DTYPE).tobytes(), choice.has_ended) for choice in self.choices
        )

    @property
    def resubmission_order(self) -> tuple[bool, float, int]:
        """What requests are sorted by that are submitted again."""
        return not self._has_news, self.arrived_s, self.handle

    def begin_attempt(self, stream: int) -> None:
        """It is submitted on a stream; unless it is the first time, what is left of it goes on after a loss."""
        for choice in self.choices:
            choice.num_resumes += self.num_attempts > 0
        self.stream = stream
        self.num_attempts += 1
        self.awaits_token = True

    @property
    def _has_news(self) -> bool:
        return any(choice.output or choice.has_ended for choice in self.choices)


@dataclass(slots=True)
class _LiveChoice:
    request: _LiveRequest
    has_begun: bool = False
    has_ended: bool = False
    output: array[int] = field(default_factory=lambda: array("i"))
    num_resumes: int = 0
    """How often it has gone on after a loss, as far as that was told."""


class RequestLedger:
    """Knows what each request has been told, and what to tell a fresh stream.

    There is at most one present stream; what comes on an older one is dropped. A handle names a choice on every
    stream that its request is submitted on. A request of n choices has n handles in a row, and goes by the first.

    Invariant: a choice is here from `add` until its one end: by `end`, `stop`, `expire`, `remove` or `remove_all`; a
    request until the last of its choices has ended. It is in `_unsent` exactly while the scheduler at the end of the
    present stream has not been sent it.

    While the requests that may have killed schedulers are tried, the others wait; see `SubmitSuspects`.
    """

    def __init__(self, lost_after_s: float, now: float) -> None:
        """Begin without a request and without a stream.

        Args:
            lost_after_s: How long requests without a stream wait for a sign of life of a scheduler.
            now: When that begins to count.
        """
        self._lost_after_s = lost_after_s
        self._has_stream = False
        # When a scheduler lived last, while there is no stream.
        self._lived_s = now
        self._exact_fingerprint = ""
        self._suspects = SubmitSuspects()
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

    def meet_cell(self, exact_fingerprint: str) -> list[tuple[int, ServiceError]]:
        """The next streams are a cell's with this fingerprint, empty where it is not exact.

        Returns:
            The choices that end, since their requests can be exact there no more, with the error.
        """
        self._exact_fingerprint = exact_fingerprint
        error = ExactUnavailableError("the cell in which the request would go on gives other bytes")
        inexact = [
            handle
            for handle, live in self._requests.items()
            if live.request.is_exact and not (exact_fingerprint and live.exact_fingerprint in (None, exact_fingerprint))
        ]
        return [end for handle in inexact for end in self._fail(handle, error)]

    def on_scheduler_death(self, died_s: float) -> list[tuple[int, ServiceError]]:
        """The scheduler of the stream that was lost has died, at `died_s` or soon after.

        Returns:
            The choices of the request that it died of, where that is known by now, which end, with the error.
        """
        guilty = self._suspects.accuse(died_s)
        if guilty is None:
            return []
        return self._fail(guilty, PoisonRequestError("the scheduler died each time that it was sent the request"))

    def open_stream(self) -> tuple[int, list[int]]:
        """A fresh stream is the present one.

        Returns:
            Its number, and the handles to submit on it in this order: who has tokens goes first, then by age.
        """
        self._detach()
        self._suspects.void()
        self._suspects.take_change()
        self._has_stream = True
        self._stream += 1
        return self._stream, self._next_handles()

    def take_released(self) -> list[int]:
        """The handles to submit on the present stream, in order, when others may be than before; mostly none."""
        return self._next_handles() if self._suspects.take_change() else []

    @property
    def is_trying(self) -> bool:
        """Whether others wait until the requests have been tried that may have killed schedulers."""
        return self._suspects.is_trying

    def must_wait(self, handle: int) -> bool:
        """Whether a request is not to be submitted before others have been tried."""
        return not self._suspects.may_submit(handle)

    def lose_stream(self, stream: int, now: float) -> None:
        """A stream has ended: its requests wait for the next one. Nothing changes unless it is the present one."""
        if stream == self._stream and self._has_stream:
            self._detach()
            self._has_stream, self._lived_s = False, now

    def hear_scheduler(self, now: float) -> None:
        """A scheduler lives, though it does not serve yet: it waits for its workers."""
        self._lived_s = now

    def next_attempt(self, handle: int, now: float) -> Attempt | None:
        """Submit a request on the present stream, once.

        Returns:
            What to send; None when the request has ended, must wait, was submitted on this stream before, or there is
            none.
        """
        if not self._has_stream or handle not in self._unsent or self.must_wait(handle):
            return None
        live = self._unsent.pop(handle)
        live.begin_attempt(self._stream)
        self._suspects.open(handle, now)
        if live.exact_fingerprint is None:
            live.exact_fingerprint = self._exact_fingerprint
        elif live.exact_fingerprint != self._exact_fingerprint:
            live.exact_fingerprint = ""
        return Attempt(
            handle,
            live.request,
            live.num_attempts,
            live.choices_so_far,
            now - live.arrived_s,
            None if live.deadline_s is None else live.deadline_s - now,
            bool(live.exact_fingerprint),
            # Not more than any of them: a count may be too low, never too high.
            min(choice.num_resumes for choice in live.choices if not choice.has_ended),
        )

    def num_resumes(self, handle: int) -> int:
        """How often a choice that has not ended has gone on after a loss, its last attempt included."""
        return self._choices[handle].num_resumes

    def resume(self, stream: int, handle: int, num_resumes: int) -> bool:
        """The scheduler tells how often a choice has gone on after a loss; returns whether that is more than known."""
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream or num_resumes <= choice.num_resumes:
            return False
        choice.num_resumes = num_resumes
        return True

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
        if choice.request.awaits_token and token_ids:
            choice.request.awaits_token = False
            self._suspects.close(choice.request.handle)
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
        for handle in self._requests:
            self._suspects.close(handle)
        self._choices.clear()
        self._requests.clear()
        self._unsent.clear()
        return handles

    def expire(self, now: float) -> list[tuple[int, ServiceError]]:
        """End requests that no scheduler has and whose time is up, and move a trial on whose time is.

        The scheduler keeps the deadlines of those that it has.

        Returns:
            The handles of their choices that had not ended, with the errors.
        """
        if not self._has_stream and now - self._lived_s >= self._lost_after_s:
            return [(handle, SchedulerLostError("the cell's scheduler was lost")) for handle in self.remove_all()]
        if self._has_stream:
            self._suspects.close_old(now)
        late = [
            handle for handle, live in self._unsent.items() if live.deadline_s is not None and live.deadline_s <= now
        ]
        error = DeadlinePassedError("the deadline passed before the request ended")
        return [end for handle in late for end in self._fail(handle, error)]

    def next_wakeup(self) -> float | None:
        """When `expire` has something to do at the earliest; None while nothing can expire."""
        if not self._unsent:
            return None
        times = [live.deadline_s for live in self._unsent.values() if live.deadline_s is not None]
        if not self._has_stream:
            times.append(self._lived_s + self._lost_after_s)
        elif (closing := self._suspects.next_closing()) is not None:
            times.append(closing)
        return min(times, default=None)

    def _next_handles(self) -> list[int]:
        """Requests that the present stream was not sent and that need not wait, in order."""
        handles = [handle for handle in self._unsent if not self.must_wait(handle)]
        return sorted(handles, key=lambda handle: self._unsent[handle].resubmission_order)

    def _fail(self, handle: int, error: ServiceError) -> list[tuple[int, ServiceError]]:
        """End a request that no scheduler has; returns the choices that had not ended, with the error."""
        choices = self.open_choices(handle)
        for choice in choices:
            self._end(choice)
        return [(choice, error) for choice in choices]

    def _end(self, handle: int) -> _LiveRequest:
        """A choice ends, and with the last one its request; returns the request."""
        choice = self._choices.pop(handle)
        choice.has_ended = True
        live = choice.request
        if all(other.has_ended for other in live.choices):
            del self._requests[live.handle]
            self._unsent.pop(live.handle, None)
            self._suspects.close(live.handle)
            # They hold each other; this way they need no garbage collector.
            live.choices = []
        return live

    def _detach(self) -> None:
        """No request is on a stream any more."""
        for live in self._requests.values():
            live.stream = None
        self._unsent = dict(self._requests)
