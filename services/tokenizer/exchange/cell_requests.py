"""The replica's requests in its cell. They outlive the stream that carries them: on the next one they go on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.exchange_codec import encode_submit, read_rows
from services.tokenizer.exchange.exchange_link import ExchangeLink
from services.tokenizer.exchange.logprobs import Logprobs, read_prompt_logprobs, read_row_logprobs
from services.tokenizer.exchange.request_ledger import RequestLedger
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import NotReadyError, ServiceError
from shared.request_fields import check_exactness

# Resubmissions spread over this time, in their order: a scheduler that has only just started meets every replica's.
LONGEST_JITTER_S = 0.5

_random = secrets.SystemRandom()


@dataclass(slots=True)
class Counters:
    """What has happened since the service started. Resumes are counted when the answers of their choices end."""

    num_lost_links: int = 0
    num_resubmissions: int = 0
    num_poison_requests: int = 0
    num_exact_resumes: int = 0
    num_other_resumes: int = 0

    def add_resumes(self, num_resumes: int, *, is_exact: bool) -> None:
        """Count the recoveries of a choice."""
        if is_exact:
            self.num_exact_resumes += num_resumes
        else:
            self.num_other_resumes += num_resumes


class Receiver(Protocol):
    """Where one choice's tokens go. It is called no more once it has ended."""

    def submitted(self, num_resumes: int, *, is_exact: bool) -> None:
        """Its request goes to a scheduler, after so many losses; whether neither they nor others change a byte."""

    def resumed(self, num_resumes: int) -> None:
        """It goes on after a loss in the cell, so many in all by now."""

    def begin(self, num_cached_tokens: int) -> None:
        """Take the number of prompt tokens that were cached; once, before the first tokens."""

    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        """Take tokens and an end; returns the number of tokens at which a stop found in text ended the choice."""

    def receive_logprobs(self, logprobs: Logprobs) -> None:
        """Take the log-probabilities of the tokens that are about to be received."""

    def receive_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Take those of the next tokens of the request's prompt."""

    def fail(self, error: ServiceError) -> None:
        """Take the error that ended the request."""


class CellRequests:
    """The shell around the ledger: streams come and go, and each choice's tokens reach its receiver.

    Invariant: a choice has its receiver here exactly while it is in the ledger. A link is here while its stream is
    the present one.
    """

    def __init__(self, lost_after_s: float) -> None:
        """Begin in the running event loop, without a stream; requests wait `lost_after_s` for a live scheduler."""
        self.counters = Counters()
        self._ledger = RequestLedger(lost_after_s, time.monotonic())
        self._receivers: dict[int, Receiver] = {}
        self._link: ExchangeLink | None = None
        self._stream = 0
        self._scheduler_instance_id = ""
        self._exact_fingerprint = ""
        # When the last stream's scheduler was heard last, if it may have died.
        self._died_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def submit(
        self,
        request: ResolvedRequest,
        receivers: Sequence[Receiver],
        *,
        arrived_s: float,
        deadline_s: float | None,
    ) -> int:
        """Send a request up; returns the handle to abort it by, the first of its choices'.

        Args:
            request: What to send.
            receivers: Get its choices' answers, one each.
            arrived_s: When it arrived, in seconds of `time.monotonic`.
            deadline_s: When its caller gives up, likewise; None is never.

        Raises:
            NotReadyError: there is no stream.
            ExactUnavailableError: it is to be exact, and the cell is not.
        """
        if self._link is None:
            raise NotReadyError("the service is not linked to its cell")
        check_exactness(self._exact_fingerprint, is_exact=request.is_exact)
        handle = self._ledger.add(request, arrived_s=arrived_s, deadline_s=deadline_s)
        self._receivers.update(enumerate(receivers, handle))
        if self._ledger.must_wait(handle):
            self._arm_timer()
        else:
            self._link.submit(handle)
        return handle

    def abort(self, handle: int) -> None:
        """Have a request forgotten; nothing happens when it has ended."""
        for choice in self._ledger.open_choices(handle):
            del self._receivers[choice]
        if self._ledger.remove(handle) and self._link is not None:
            self._link.abort(handle)
        self._submit_released()

    def make_link(self) -> ExchangeLink:
        """What goes up a new stream, which is not the present one yet."""
        return ExchangeLink(self._make_submit)

    def open_stream(self, link: ExchangeLink, cell_info: exchange_pb2.CellInfo) -> int:
        """The stream of `link` is the present one: what lives goes on there, in this cell.

        Returns:
            The number of requests that are submitted again.
        """
        self._meet_scheduler(cell_info.scheduler_instance_id)
        self._exact_fingerprint = cell_info.exact_fingerprint
        self._fail_each(self._ledger.meet_cell(cell_info.exact_fingerprint))
        self._link = link
        self._stream, handles = self._ledger.open_stream()
        self._arm_timer()
        delays = sorted(_random.uniform(0.0, LONGEST_JITTER_S) for _ in handles)
        for handle, delay in zip(handles, delays, strict=True):
            self._loop.call_later(delay, link.submit, handle)
        return len(handles)

    def lose_stream(self, link: ExchangeLink, *, died_s: float | None = None) -> None:
        """A stream has ended; if it is the present one, its requests wait for the next.

        Args:
            link: The stream's.
            died_s: When the scheduler was heard last, if it gave no reason for the end: unless the next stream is its
                own again, it has died.
        """
        link.close()
        if link is self._link:
            self.counters.num_lost_links += 1
            self._link, self._died_s = None, died_s
            self._ledger.lose_stream(self._stream, time.monotonic())
            self._expire()

    def hear_scheduler(self) -> None:
        """A scheduler lives, though it does not serve yet: what waits for it is not lost."""
        if self._link is None:
            self._ledger.hear_scheduler(time.monotonic())
            self._arm_timer()

    def fail_all(self, error: ServiceError) -> None:
        """End all requests with an error."""
        for handle in self._ledger.remove_all():
            self._receivers.pop(handle).fail(error)

    def on_outputs(self, outputs: exchange_pb2.Outputs) -> None:
        """Hand out what one step on the present stream brought: beginnings, tokens and ends.

        Raises:
            ExchangeError: columns do not fit each other, or tokens are missing.
        """
        for resume in outputs.resumes:
            if self._ledger.resume(self._stream, resume.handle, resume.num_resumes):
                self._receivers[resume.handle].resumed(resume.num_resumes)
        for start in outputs.starts:
            if self._ledger.begin(self._stream, start.handle):
                self._receivers[start.handle].begin(start.num_cached_tokens)
        if outputs.prompt_logprobs:
            self._receive_prompt_logprobs(outputs.prompt_logprobs)
        handle_to_logprobs = read_row_logprobs(outputs) if outputs.HasField("logprobs") else {}
        ends = {end.handle: end for end in outputs.ends}
        receive, stream, receivers = self._ledger.receive, self._stream, self._receivers
        for handle, first_index, token_ids in read_rows(outputs):
            new_ids = receive(stream, handle, first_index, token_ids)
            if not new_ids:
                continue
            if handle_to_logprobs and handle in handle_to_logprobs:
                receivers[handle].receive_logprobs(handle_to_logprobs[handle].last(len(new_ids)))
            if ends and handle in ends:
                self._end(handle, new_ids, ends.pop(handle))
                continue
            stop_at = receivers[handle].receive(new_ids, None)
            if stop_at is not None:
                self._stop(handle, stop_at)
        for handle, end in ends.items():
            self._end(handle, (), end)
        self._submit_released()

    def _meet_scheduler(self, instance_id: str) -> None:
        """A scheduler serves: where it is not the last one, that one may have died, and a request may be to blame."""
        if self._died_s is not None and instance_id != self._scheduler_instance_id:
            ends = self._ledger.on_scheduler_death(self._died_s)
            self.counters.num_poison_requests += bool(ends)
            self._fail_each(ends)
        self._died_s, self._scheduler_instance_id = None, instance_id

    def _fail_each(self, ends: Iterable[tuple[int, ServiceError]]) -> None:
        for handle, error in ends:
            self._receivers.pop(handle).fail(error)

    def _submit_released(self) -> None:
        """Submit what had to wait for a trial that has moved on."""
        if self._link is not None:
            for handle in self._ledger.take_released():
                self._link.submit(handle)

    def _end(self, handle: int, token_ids: Sequence[int], end: exchange_pb2.RequestEnd) -> None:
        if self._ledger.end(self._stream, handle):
            self._receivers.pop(handle).receive(token_ids, end)

    def _receive_prompt_logprobs(self, messages: Iterable[exchange_pb2.PromptLogprobs]) -> None:
        for message in messages:
            logprobs = read_prompt_logprobs(message.logprobs)
            num_new = self._ledger.receive_prompt(self._stream, message.handle, int(logprobs.indexes[0]), len(logprobs))
            if num_new:
                self._receivers[message.handle].receive_prompt_logprobs(logprobs.last(num_new))

    def _stop(self, handle: int, stop_at: int) -> None:
        """A stop found in text ended a choice: the cell is to be told."""
        self._ledger.stop(handle)
        del self._receivers[handle]
        assert self._link is not None
        self._link.stop_at(handle, stop_at)

    def _make_submit(self, handle: int) -> exchange_pb2.Submit | None:
        attempt = self._ledger.next_attempt(handle, time.monotonic())
        if attempt is None:
            return None
        self.counters.num_resubmissions += attempt.number > 1
        for choice in self._ledger.open_choices(handle):
            self._receivers[choice].submitted(self._ledger.num_resumes(choice), is_exact=attempt.resumes_exactly)
        if self._ledger.is_trying:
            self._arm_timer()
        return encode_submit(attempt)

    def _expire(self) -> None:
        self._fail_each(self._ledger.expire(time.monotonic()))
        self._submit_released()
        self._arm_timer()

    def _arm_timer(self) -> None:
        """Come back when requests expire that wait, for a stream or for others that are tried on it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakeup = self._ledger.next_wakeup() if self._link is None or self._ledger.is_trying else None
        if wakeup is not None:
            self._timer = self._loop.call_later(wakeup - time.monotonic(), self._expire)
