"""The replica's requests in its cell."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.answer.answer import Choice
from services.tokenizer.exchange.exchange_codec import (
    encode_request,
    encode_submit,
    read_prompt_logprobs,
    read_row_logprobs,
    read_rows,
    read_vector,
)
from services.tokenizer.exchange.request_ledger import RequestLedger
from services.tokenizer.exchange.scheduler_stream import SchedulerStream
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import PoisonRequestError, ServiceError
from shared.ids import RequestHandle, choice_handles
from shared.request.request_fields import check_exactness
from shared.wire import Introduction, find_needs, introduce_self, lower_of, read_introduction

# Resubmissions are spread over this time, in their order: a new scheduler gets those of every replica at once.
LONGEST_JITTER_S = 0.5

_random = secrets.SystemRandom()


@dataclass(slots=True)
class Counters:
    """Counts since the service started. Resumes count when their request ends."""

    num_lost_links: int = 0
    num_resubmissions: int = 0
    num_poison_requests: int = 0
    num_exact_resumes: int = 0
    num_other_resumes: int = 0

    def add_resumes(self, num_resumes: int, *, is_exact: bool) -> None:
        """Count one choice's resumes."""
        if is_exact:
            self.num_exact_resumes += num_resumes
        else:
            self.num_other_resumes += num_resumes


class CellRequests:
    """The I/O shell around the ledger. Requests outlive the stream that carries them.

    Invariant: `_choices` are exactly those in the ledger.
    """

    def __init__(self, lost_after_s: float) -> None:
        """Needs a running event loop; requests wait at most `lost_after_s` for a sign of life from a scheduler."""
        self.counters = Counters()
        self._ledger = RequestLedger(lost_after_s, time.monotonic())
        self._choices: dict[RequestHandle, Choice] = {}
        self.stream: SchedulerStream | None = None
        """The current one, on which requests are submitted; None while there is none."""
        # The ledger's number of the last stream.
        self._stream_number = 0
        self._scheduler_instance_id = ""
        # When the last stream's scheduler was last heard from, if it may have died.
        self._died_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def is_trying(self) -> bool:
        """Whether new requests wait here for a trial of others; see `SubmitSuspects`."""
        return self._ledger.suspects.is_trying

    def submit(
        self,
        request: ResolvedRequest,
        choices: Sequence[Choice],
        *,
        arrived_at: float,
        deadline_at: float | None,
    ) -> RequestHandle:
        """Submit a request, now or once there is a stream; returns its handle for `abort`.

        Args:
            choices: Its choices, which get the tokens; none is called after it has ended.
            arrived_at: In seconds of `time.monotonic`, as `deadline_at`.

        Raises:
            SchedulerLostError: there is no stream, and has not been for as long as requests wait for one.
            ExactUnavailableError: the request must be exact, and the cell is not.
            NotSupportedError: the cell lacks what the request needs.
        """
        self._ledger.check_reachable(time.monotonic())
        check_exactness(self._ledger.exact_fingerprint, is_exact=request.is_exact)
        request.needs = find_needs(encode_request(request))
        self._ledger.introduction.check(request.needs)
        handle = self._ledger.add(request, arrived_at=arrived_at, deadline_at=deadline_at)
        self._choices.update(zip(choice_handles(handle, request.n), choices, strict=True))
        if self.stream is None or not self._ledger.suspects.may_submit(handle):
            self._arm_timer()
        else:
            self.stream.submit(handle)
        return handle

    def abort(self, handle: RequestHandle) -> None:
        """Abort a request unless it has already ended."""
        if numbers := self._ledger.open_choices(handle):
            for number in numbers:
                del self._choices[number]
            if self._ledger.remove(handle) and self.stream is not None:
                self.stream.abort(handle)
        self._submit_released()

    def make_submit(self, handle: RequestHandle) -> exchange_pb2.Submit | None:
        """The message with a request's next attempt; None if there is nothing to submit any more."""
        now = time.monotonic()
        request = self._ledger.begin_attempt(handle, now)
        if request is None:
            return None
        self.counters.num_resubmissions += request.num_attempts > 1
        for number in self._ledger.open_choices(handle):
            num_resumes = request.choices[number - handle].num_resumes
            self._choices[number].submitted(num_resumes, is_exact=request.resumes_exactly)
        if self._ledger.suspects.is_trying:
            self._arm_timer()
        return encode_submit(request, now)

    def open_stream(self, stream: SchedulerStream, cell_info: exchange_pb2.CellInfo) -> int:
        """Make `stream` the current one; returns how many live requests will be submitted on it.

        They are spread over `LONGEST_JITTER_S`. Those that cannot be resumed in this cell end with an error.
        """
        self._on_scheduler(cell_info.scheduler_instance_id)
        self._fail_each(self._ledger.on_cell(cell_info.exact_fingerprint, _common_introduction(cell_info)))
        self.stream = stream
        waits_for_trial = stream.has_trial is not None
        self._stream_number, handles = self._ledger.open_stream(time.monotonic(), waits_for_trial=waits_for_trial)
        if self._ledger.suspects.is_trying:
            # It asks for the trial at once.
            stream.beat()
        self._arm_timer()
        delays = sorted(_random.uniform(0.0, LONGEST_JITTER_S) for _ in handles)
        for handle, delay in zip(handles, delays, strict=True):
            self._loop.call_later(delay, stream.submit, handle)
        return len(handles)

    def note_cell(self, cell_info: exchange_pb2.CellInfo) -> None:
        """The current cell has changed; see `RequestLedger.note_cell`."""
        self._ledger.note_cell(cell_info.exact_fingerprint, _common_introduction(cell_info))

    def lose_stream(self, stream: SchedulerStream, *, died_at: float | None = None) -> None:
        """A stream has ended; if it is the current one, its requests wait for the next.

        `died_at` is when the scheduler was last heard from, if the stream's end is unexplained: it counts as dead
        unless the next stream is from the same instance.
        """
        stream.close()
        if stream is self.stream:
            self.counters.num_lost_links += 1
            self.stream, self._died_at = None, died_at
            self._ledger.lose_stream(self._stream_number, time.monotonic())
            self._expire()

    def note_scheduler_alive(self) -> None:
        """A scheduler is up but not serving yet: waiting requests are not lost."""
        if self.stream is None:
            self._ledger.note_scheduler_alive(time.monotonic())
            self._arm_timer()

    def note_heard(self, stream: SchedulerStream) -> None:
        """A stream's scheduler was heard: if it is the current one, a trial may begin, or a control be over."""
        if stream is self.stream and self._ledger.suspects.is_trying:
            self._ledger.note_heard(time.monotonic(), has_trial=stream.has_trial is not False)
            self._submit_released()

    def fail_all(self, error: ServiceError) -> None:
        """End all requests with an error."""
        for handle in self._ledger.remove_all():
            self._choices.pop(handle).fail(error)

    def fail_begun(self, error: ServiceError) -> None:
        """End all requests that were submitted before with an error."""
        self._fail_each(self._ledger.fail_begun(error))
        self._submit_released()

    def on_outputs(self, stream: SchedulerStream, outputs: exchange_pb2.Outputs) -> None:
        """Pass one message on to the choices, if `stream` is the current one.

        Raises:
            ExchangeError: the columns are inconsistent, or tokens are missing.
        """
        if stream is not self.stream:
            return
        for resume in outputs.resumes:
            handle = RequestHandle(resume.handle)
            if self._ledger.resume(self._stream_number, handle, resume.num_resumes):
                self._choices[handle].resumed(resume.num_resumes)
        if outputs.starts:
            self._begin_each(outputs.starts)
        if outputs.prompt_logprobs or outputs.vectors:
            self._receive_of_prompts(outputs)
        handle_to_logprobs = read_row_logprobs(outputs) if outputs.HasField("logprobs") else {}
        ends = {RequestHandle(end.handle): end for end in outputs.ends}
        receive, number, choices = self._ledger.receive, self._stream_number, self._choices
        for handle, first_index, token_ids in read_rows(outputs):
            new_ids = receive(number, handle, first_index, token_ids)
            if not new_ids:
                continue
            if handle_to_logprobs and handle in handle_to_logprobs:
                choices[handle].receive_logprobs(handle_to_logprobs[handle].last(len(new_ids)))
            if ends and handle in ends:
                self._end(handle, new_ids, ends.pop(handle))
                continue
            stop_at = choices[handle].receive(new_ids, None)
            if stop_at is not None:
                self._stop(handle, stop_at)
        for handle, end in ends.items():
            self._end(handle, (), end)
        self._submit_released()

    def _on_scheduler(self, instance_id: str) -> None:
        """If this scheduler replaces one that may have died, a request may be to blame."""
        if self._died_at is not None and instance_id != self._scheduler_instance_id:
            ends = self._ledger.on_scheduler_death(self._died_at)
            self.counters.num_poison_requests += any(isinstance(error, PoisonRequestError) for _, error in ends)
            self._fail_each(ends)
        self._died_at, self._scheduler_instance_id = None, instance_id

    def _fail_each(self, ends: Iterable[tuple[RequestHandle, ServiceError]]) -> None:
        for handle, error in ends:
            self._choices.pop(handle).fail(error)

    def _submit_released(self) -> None:
        if self.stream is not None and self._ledger.suspects.has_changed:
            for handle in self._ledger.take_released():
                self.stream.submit(handle)

    def _end(self, handle: RequestHandle, token_ids: Sequence[int], end: exchange_pb2.RequestEnd) -> None:
        if self._ledger.end(self._stream_number, handle):
            self._choices.pop(handle).receive(token_ids, end)

    def _begin_each(self, starts: Iterable[exchange_pb2.RequestStart]) -> None:
        for start in starts:
            handle = RequestHandle(start.handle)
            if self._ledger.begin(self._stream_number, handle):
                queue_s = 1e-6 * start.queue_time_us if start.HasField("queue_time_us") else None
                prefill_s = 1e-6 * start.prefill_time_us if start.HasField("prefill_time_us") else None
                self._choices[handle].begin(start.num_cached_tokens, queue_s, prefill_s)

    def _receive_of_prompts(self, outputs: exchange_pb2.Outputs) -> None:
        """Take what is known of prompts, before the choices' ends, which may be in the same message."""
        for vector in outputs.vectors:
            if (choice := self._choices.get(RequestHandle(vector.handle))) is not None:
                choice.receive_vector(read_vector(vector))
        for message in outputs.prompt_logprobs:
            logprobs = read_prompt_logprobs(message.logprobs)
            handle, first_position = RequestHandle(message.handle), int(logprobs.indexes[0])
            num_new = self._ledger.receive_prompt(self._stream_number, handle, first_position, len(logprobs))
            if num_new:
                self._choices[handle].receive_prompt_logprobs(logprobs.last(num_new))

    def _stop(self, handle: RequestHandle, stop_at: int) -> None:
        self._ledger.stop(handle)
        del self._choices[handle]
        assert self.stream is not None
        self.stream.stop_at(handle, stop_at)

    def _expire(self) -> None:
        self._fail_each(self._ledger.expire(time.monotonic()))
        self._submit_released()
        self._arm_timer()

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakeup = self._ledger.next_wakeup() if self.stream is None or self._ledger.suspects.is_trying else None
        if wakeup is not None:
            self._timer = self._loop.call_later(wakeup - time.monotonic(), self._expire)


def _common_introduction(cell_info: exchange_pb2.CellInfo) -> Introduction:
    return lower_of(introduce_self(), read_introduction(cell_info.introduction))
