"""The live requests of one replica, with everything that another scheduler needs to resume them.

Pure: no I/O, and no clock; `now` is passed in, so that recovery can be simulated from a seed. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

from services.tokenizer.exchange.submit_suspects import SubmitSuspects
from services.tokenizer.request.resolved_request import RequestChoice, ResolvedRequest
from shared.errors import (
    DeadlinePassedError,
    ExactUnavailableError,
    PoisonRequestError,
    SchedulerLostError,
    ServiceError,
)
from shared.ids import RequestHandle, choice_handles
from shared.wire import NOT_INTRODUCED, Introduction


class ExchangeError(Exception):
    """The scheduler violated the protocol."""


class RequestLedger:
    """Tracks what each request has received, and what to submit on a new stream.

    A handle names a choice, on every stream. A request with n choices has n consecutive handles and is named by the
    first. There is at most one current stream; messages of older streams are dropped. Request 7 with two choices:

                    stream 1             no stream     stream 2
        request 7   |-- attempt 1 ---X   (unsent)      |-- attempt 2 ------------------->
                                                         choices_so_far: abc, xy (ended)
        choice 7        a b c                             d e end
        choice 8        x y end

    Invariant: a choice is here from `add` until it ends, exactly once, by `end`, `stop`, `expire`, `remove`,
    `remove_all` or an error; a request until its last choice has ended. A request is in `_unsent` exactly while it has
    not been submitted on the current stream.

    While requests that may have killed schedulers are on trial, the others wait, and during a control all of them do;
    see `SubmitSuspects`.
    """

    def __init__(self, lost_after_s: float, now: float, suspects: SubmitSuspects | None = None) -> None:
        """Start without a stream; requests then wait `lost_after_s` from the last sign of life, at first from `now`.

        Args:
            suspects: New ones if None.
        """
        self._lost_after_s = lost_after_s
        self._has_stream = False
        # The last sign of life of a scheduler; only used while there is no stream.
        self._alive_at = now
        self.exact_fingerprint = ""
        """The fingerprint of the current cell; empty if it is not exact, or there was none yet."""
        self.introduction = NOT_INTRODUCED
        """What this service and all services of the current cell can do."""
        self.suspects = suspects or SubmitSuspects()
        """Which requests must wait for a trial of others; it is the ledger that tells them of streams and submits."""
        self._stream = 0
        self._next_handle = RequestHandle(1)
        self._choices: dict[RequestHandle, RequestChoice] = {}
        self._requests: dict[RequestHandle, ResolvedRequest] = {}
        self._unsent: dict[RequestHandle, ResolvedRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: ResolvedRequest, *, arrived_at: float, deadline_at: float | None) -> RequestHandle:
        """Add a request and return the handle of its first choice; `begin_attempt` submits it."""
        handle = request.handle = self._next_handle
        self._next_handle = RequestHandle(handle + request.n)
        request.arrived_at, request.deadline_at = arrived_at, deadline_at
        request.choices = [RequestChoice(request) for _ in range(request.n)]
        self._requests[handle] = self._unsent[handle] = request
        self._choices.update(zip(choice_handles(handle, request.n), request.choices, strict=True))
        return handle

    def open_choices(self, handle: RequestHandle) -> list[RequestHandle]:
        """The handles of a request's unfinished choices; none if the request has ended."""
        request = self._requests.get(handle)
        if request is None:
            return []
        handles = choice_handles(handle, request.n)
        return [
            choice_handle
            for choice_handle, choice in zip(handles, request.choices, strict=True)
            if not choice.has_ended
        ]

    def on_cell(
        self, exact_fingerprint: str, introduction: Introduction = NOT_INTRODUCED
    ) -> list[tuple[RequestHandle, ServiceError]]:
        """The next streams belong to a cell with this fingerprint, empty if it is not exact, and this introduction.

        Returns:
            The choices that end with an error, because their requests cannot be continued in this cell.
        """
        self.note_cell(exact_fingerprint, introduction)
        ends = []
        for handle, request in list(self._requests.items()):
            try:
                self._check_resume(request)
            except ServiceError as error:
                ends += self._fail(handle, error)
        return ends

    def note_cell(self, exact_fingerprint: str, introduction: Introduction) -> None:
        """The current stream's cell is like this now; its scheduler looks after requests already submitted."""
        self.exact_fingerprint, self.introduction = exact_fingerprint, introduction

    def on_scheduler_death(self, died_at: float) -> list[tuple[RequestHandle, ServiceError]]:
        """The scheduler of the lost stream has died, at `died_at` or soon after.

        Returns:
            The choices that end with an error: those of the request that is found guilty, or all if schedulers keep on
            dying although no request is to blame.
        """
        guilty = self.suspects.accuse(died_at)
        if self.suspects.is_hopeless:
            lost = SchedulerLostError("the cell's schedulers die, even without requests")
            return [(handle, lost) for handle in self.remove_all()]
        if guilty is None:
            return []
        return self._fail(guilty, PoisonRequestError("the scheduler died each time it received the request"))

    def open_stream(self, now: float, *, waits_for_trial: bool = False) -> tuple[int, list[RequestHandle]]:
        """Make a new stream the current one: its scheduler is ready.

        Args:
            now: The time.
            waits_for_trial: Whether the scheduler says when suspects may be tried; see `note_heard`.

        Returns:
            Its number, and the handles to submit on it, in order: requests with output first, then by age.
        """
        self._detach()
        self.suspects.begin_stream(now, waits_for_trial=waits_for_trial)
        self.suspects.take_change()
        self._has_stream = True
        self._stream += 1
        return self._stream, self._next_handles()

    def take_released(self) -> list[RequestHandle]:
        """The handles to submit, in order, if a trial has advanced since the last call; otherwise none."""
        return self._next_handles() if self.suspects.take_change() else []

    def lose_stream(self, stream: int, now: float) -> None:
        """A stream has ended: its requests wait for the next one. Does nothing unless it is the current one."""
        if stream == self._stream and self._has_stream:
            self._detach()
            self._has_stream, self._alive_at = False, now

    def check_reachable(self, now: float) -> None:
        """Check that a request may wait for the next stream, or need not.

        Raises:
            SchedulerLostError: there is no stream, and has not been for too long.
        """
        if not self._has_stream and now - self._alive_at >= self._lost_after_s:
            raise SchedulerLostError("the cell's scheduler was lost")

    def note_heard(self, now: float, *, has_trial: bool = True) -> None:
        """The current stream's scheduler was heard, which may begin a trial or end a control; see `take_released`.

        Args:
            now: The time.
            has_trial: Whether the scheduler lets this replica try its suspects.
        """
        if self._has_stream:
            if has_trial:
                self.suspects.give_trial(now)
            self.suspects.note_alive(now)

    def note_scheduler_alive(self, now: float) -> None:
        """A scheduler is up but not serving yet: it is waiting for its workers."""
        self._alive_at = now

    def begin_attempt(self, handle: RequestHandle, now: float) -> ResolvedRequest | None:
        """Submit a request on the current stream, at most once per stream.

        Returns:
            The request to send. None if there is no stream, or the request has ended, must wait, or was already
            submitted on this stream.
        """
        if not self._has_stream or handle not in self._unsent or not self.suspects.may_submit(handle):
            return None
        request = self._unsent.pop(handle)
        request.begin_attempt(self._stream, self.exact_fingerprint)
        self.suspects.open(handle, now)
        return request

    def resume(self, stream: int, handle: RequestHandle, num_resumes: int) -> bool:
        """The scheduler reports a choice's number of resumes; returns whether that is more than was known."""
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream or num_resumes <= choice.num_resumes:
            return False
        choice.num_resumes = num_resumes
        return True

    def begin(self, stream: int, handle: RequestHandle) -> bool:
        """A choice's first tokens are about to arrive; returns whether that was not known before."""
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream or choice.has_begun:
            return False
        choice.has_begun = True
        return True

    def receive(self, stream: int, handle: RequestHandle, first_index: int, token_ids: list[int]) -> list[int]:
        """Take completion tokens of a choice; the first of them has the index `first_index` in the completion.

        Returns:
            The new ones among them; none if the choice has ended, or was not submitted on `stream`.

        Raises:
            ExchangeError: tokens before `first_index` are missing.
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
            self.suspects.note_token(choice.request.handle)
        return token_ids

    def receive_prompt(self, stream: int, handle: RequestHandle, first_position: int, num_positions: int) -> int:
        """Note that log-probabilities of `num_positions` consecutive prompt positions have arrived.

        Returns:
            How many of them are new; these are the last ones. 0 if the choice has ended, or was not submitted on
            `stream`.

        Raises:
            ExchangeError: positions before `first_position` are missing.
        """
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream:
            return 0
        request = choice.request
        if first_position > request.num_prompt_positions:
            raise ExchangeError("positions of the prompt are missing")
        num_new = max(0, first_position + num_positions - request.num_prompt_positions)
        request.num_prompt_positions += num_new
        return num_new

    def end(self, stream: int, handle: RequestHandle) -> bool:
        """The scheduler ended a choice; returns whether the choice was still live on `stream`."""
        choice = self._choices.get(handle)
        if choice is None or choice.request.stream != stream:
            return False
        self._end(handle)
        return True

    def stop(self, handle: RequestHandle) -> bool:
        """End a choice from this side, because a stop string was found. Does nothing if it has ended.

        Returns:
            As `remove`.
        """
        if handle not in self._choices:
            return False
        return self._end(handle).stream is not None

    def remove(self, handle: RequestHandle) -> bool:
        """End a request from this side, because its client is gone. Does nothing if it has ended.

        Returns:
            Whether it was submitted on the current stream, so that the scheduler must be notified.
        """
        request = self._requests.get(handle)
        for number in self.open_choices(handle):
            self._end(number)
        return request is not None and request.stream is not None

    def remove_all(self) -> list[RequestHandle]:
        """End all requests from this side; returns the handles of their unfinished choices."""
        handles = list(self._choices)
        self.suspects.forget_all()
        self._choices.clear()
        self._requests.clear()
        self._unsent.clear()
        return handles

    def fail_begun(self, error: ServiceError) -> list[tuple[RequestHandle, ServiceError]]:
        """End all requests that were submitted before; returns their unfinished choices, each with the error."""
        begun = [handle for handle, request in self._requests.items() if request.num_attempts]
        return [end for handle in begun for end in self._fail(handle, error)]

    def expire(self, now: float) -> list[tuple[RequestHandle, ServiceError]]:
        """End the unsent requests whose time is up, and advance a trial whose time is up.

        The scheduler enforces the deadlines of submitted requests.

        Returns:
            The choices that end, each with its error.
        """
        try:
            self.check_reachable(now)
        except SchedulerLostError as lost:
            return [(handle, lost) for handle in self.remove_all()]
        if self._has_stream:
            self.suspects.close_old(now)
        late = [
            handle
            for handle, request in self._unsent.items()
            if request.deadline_at is not None and request.deadline_at <= now
        ]
        error = DeadlinePassedError("the deadline passed before the request ended")
        return [end for handle in late for end in self._fail(handle, error)]

    def next_wakeup(self) -> float | None:
        """The earliest time at which `expire` has something to do, if any."""
        if not self._unsent:
            return None
        times = [request.deadline_at for request in self._unsent.values() if request.deadline_at is not None]
        if not self._has_stream:
            times.append(self._alive_at + self._lost_after_s)
        elif (closing := self.suspects.next_closing()) is not None:
            times.append(closing)
        return min(times, default=None)

    def _check_resume(self, request: ResolvedRequest) -> None:
        """Check whether the current cell can continue a request.

        Raises:
            ExactUnavailableError: its bytes would differ.
            NotSupportedError: the cell lacks what it needs.
        """
        if not request.may_resume_with(self.exact_fingerprint):
            raise ExactUnavailableError("the request would be resumed in a cell whose answers differ in their bytes")
        self.introduction.check(request.needs)

    def _next_handles(self) -> list[RequestHandle]:
        """The unsent requests that need not wait, in order of submission."""
        handles = [handle for handle in self._unsent if self.suspects.may_submit(handle)]
        return sorted(handles, key=lambda handle: self._unsent[handle].resubmission_order)

    def _fail(self, handle: RequestHandle, error: ServiceError) -> list[tuple[RequestHandle, ServiceError]]:
        """End a request from this side; returns its unfinished choices, each with the error."""
        choices = self.open_choices(handle)
        for choice in choices:
            self._end(choice)
        return [(choice, error) for choice in choices]

    def _end(self, handle: RequestHandle) -> ResolvedRequest:
        """End a choice, and with the last one its request; returns the request."""
        choice = self._choices.pop(handle)
        choice.has_ended = True
        request = choice.request
        if all(other.has_ended for other in request.choices):
            del self._requests[request.handle]
            self._unsent.pop(request.handle, None)
            self.suspects.close(request.handle)
            # Breaks the reference cycle, so that they are freed without the garbage collector.
            request.choices = []
        return request

    def _detach(self) -> None:
        for request in self._requests.values():
            request.stream = None
        self._unsent = dict(self._requests)
