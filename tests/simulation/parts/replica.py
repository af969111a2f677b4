"""The simulated tokenizer replica: the real request ledger, and a shell around it without sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random

from google.rpc import error_details_pb2

from lockstep.internal.v1 import exchange_pb2
from services.scheduler.core.batch.sequence import Finish, FinishReason
from services.scheduler.server.exchange_codec import FINISH_REASONS
from services.tokenizer.answer.logprobs import LogprobColumns
from services.tokenizer.exchange.exchange_codec import (
    encode_handles,
    encode_submit,
    read_prompt_logprobs,
    read_row_logprobs,
    read_rows,
)
from services.tokenizer.exchange.request_ledger import ExchangeError, RequestLedger
from services.tokenizer.exchange.submit_suspects import SubmitSuspects
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import ModelChangedError, ServiceError
from shared.ids import RequestHandle, choice_handles
from shared.network.heartbeat import HEARTBEAT_S
from shared.wire import read_introduction
from tests.simulation.network.clock import Clock
from tests.simulation.network.exchange import ExchangeStream
from tests.simulation.workload import RequestPlan
from tests.support.scheduler.engine_driver import Scores, token_bytes

# Without a stream for this long, requests fail. Longer than a worker's first step may take.
_LOST_AFTER_S = 5000.0
_FAR_S = 1000.0
_RECONNECT_S = (0.05, 0.5)
_RESUBMIT_S = 0.5
_FINISH_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}
_SILENT_ENDS = (FinishReason.EOS, FinishReason.STOP_TOKEN)


@dataclass(slots=True)
class ChoiceRecord:
    """What a client has received of one choice; at the end `finish`, `error` or `is_cancelled` is set."""

    plan: RequestPlan
    choice: int
    request: RequestHandle
    """The handle of its request."""
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    """The log-probabilities of `tokens`."""
    prompt_scores: list[Scores] = field(default_factory=list)
    """The log-probabilities of the prompt."""
    num_cached_tokens: int | None = None
    num_completion_tokens: int = 0
    finish: Finish | None = None
    error: str | None = None
    """The error's reason code."""
    is_cancelled: bool = False
    weights_digests: set[str] = field(default_factory=set)
    """Weights digests of the cells whose tokens a replica's client has received."""
    deadline: float | None = None
    over_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the choice has ended and may receive nothing more."""
        return self.finish is not None or self.error is not None or self.is_cancelled


class Replica:
    """One tokenizer process with its clients and its `Exchange` stream.

    Invariant: a choice is in `_records` exactly as long as it is in the ledger.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        *,
        connect: Callable[[Replica], ExchangeStream | None],
        on_over: Callable[[ChoiceRecord], None],
    ) -> None:
        """Connect to the scheduler, or keep trying.

        Args:
            connect: Opens a stream to the scheduler; returns None when there is no scheduler.
            on_over: Called when a choice has ended for its client.
        """
        self.is_alive = True
        self._clock = clock
        self._rng = rng
        self._connect = connect
        self._on_over = on_over
        self._ledger = RequestLedger(_LOST_AFTER_S, clock.now, SubmitSuspects(rng.random))
        self._records: dict[RequestHandle, ChoiceRecord] = {}
        self._was_submitted: set[RequestHandle] = set()
        # New requests are sent once the cell info has arrived; some replicas resubmit earlier requests before that.
        self._resubmits_at_once = rng.random() < 0.5
        self._stream: ExchangeStream | None = None
        self._is_open = False
        self._knows_cell = False
        # The scheduler of the last stream, and when that stream was lost.
        self._scheduler_id = ""
        self._died_at: float | None = None
        self._timer: float | None = None
        # Of the last cell.
        self._weights_digest = ""
        # Called when the stream is lost; None until the process was asked to end.
        self._on_drain_lost: Callable[[], None] | None = None
        self.num_controls = 0
        """Schedulers to which nothing was submitted, so that no request is blamed for their deaths."""
        self.connect()

    def connect(self) -> None:
        """Open a stream now, or as soon as there is a scheduler."""
        if not self.is_alive:
            return
        self._stream = self._connect(self)
        if self._stream is None:
            self._clock.after(self._rng.uniform(*_RECONNECT_S), self.connect)
        elif self._resubmits_at_once:
            self._open_stream(self._stream)

    def is_serving(self, request_id: str) -> bool:
        """Whether a request with this id is in progress here; a replica refuses a second one."""
        return any(record.plan.request_id == request_id for record in self._records.values())

    def serve(self, plan: RequestPlan) -> list[ChoiceRecord]:
        """Accept a client's request; returns the records of its choices, which fill up as answers arrive."""
        request = ResolvedRequest(
            plan.request_id,
            token_bytes(plan.prompt),
            plan.params,
            plan.priority,
            plan.cache_salt,
            plan.n,
            is_exact=plan.is_exact,
            tenant=plan.tenant,
        )
        deadline_at = None if plan.patience_s is None else self._clock.now + plan.patience_s
        handle = self._ledger.add(request, arrived_at=self._clock.now, deadline_at=deadline_at)
        choices = [ChoiceRecord(plan, choice, handle, deadline=deadline_at) for choice in range(plan.n)]
        self._records.update(zip(choice_handles(handle, plan.n), choices, strict=True))
        if self._knows_cell:
            self._submit(handle)
        if plan.cancel_after_s is not None:
            self._clock.after(plan.cancel_after_s, lambda: self._cancel(handle))
        self._arm_timer()
        return choices

    def on_response(self, stream: ExchangeStream, payload: bytes) -> None:
        """Handle a message of a scheduler, possibly on a stream that has been replaced."""
        if not self.is_alive:
            return
        response = exchange_pb2.ExchangeResponse.FromString(payload)
        if not response.HasField("outputs"):
            if stream is self._stream:
                self._note_weights(response.cell_info.weights_digest)
                introduction = read_introduction(response.cell_info.introduction)
                self._fail_each(self._ledger.on_cell(response.cell_info.exact_fingerprint, introduction))
                self._on_cell_info(stream)
            return
        try:
            self._on_outputs(stream, response.outputs)
        except ExchangeError:
            stream.break_()
            self.on_stream_lost(stream)

    def on_stream_lost(self, stream: ExchangeStream) -> None:
        """Handle the end of the stream and plan to open another."""
        if stream is not self._stream or not self.is_alive:
            return
        self._stream = None
        if self._on_drain_lost is not None:
            self._on_drain_lost()
        if self._is_open:
            self._died_at = self._clock.now
        self._is_open = self._knows_cell = False
        self._ledger.lose_stream(stream.ledger_number, self._clock.now)
        self._expire()
        self._clock.after(self._rng.uniform(*_RECONNECT_S), self.connect)

    @property
    def has_requests(self) -> bool:
        """Whether a client waits for an answer."""
        return bool(self._records)

    @property
    def num_requests(self) -> int:
        """The choices for which clients wait."""
        return len(self._records)

    @property
    def is_served(self) -> bool:
        """Whether the scheduler has workers for it."""
        return self._stream is not None and self._knows_cell

    def drain(self, drain_s: float, on_lost: Callable[[], None]) -> None:
        """Ask the process to end (SIGTERM): once its answers are finished, at the latest after `drain_s`.

        `on_lost` is called when it loses its stream meanwhile.
        """
        if not self.is_alive:
            return
        self._on_drain_lost = on_lost
        self._send(exchange_pb2.ExchangeRequest(is_draining=True))
        self._clock.after(drain_s, partial(self.die, "DRAINING"))
        self._clock.after(0.0, self._end_if_drained)

    def die(self, error: str = "REPLICA_GONE") -> None:
        """End the process: its clients get an error and its stream breaks."""
        if not self.is_alive:
            return
        self.is_alive = False
        for handle in self._ledger.remove_all():
            self._end(handle, error=error)
        if self._stream is not None:
            self._stream.break_()

    def _open_stream(self, stream: ExchangeStream) -> None:
        """Resubmit all live requests on this stream, in order, spread over `_RESUBMIT_S`."""
        self._is_open = True
        if self._on_drain_lost is not None:
            stream.send_request(exchange_pb2.ExchangeRequest(is_draining=True))
        if self._died_at is not None and stream.scheduler_id != self._scheduler_id:
            self._fail_each(self._ledger.on_scheduler_death(self._died_at))
        self._died_at, self._scheduler_id = None, stream.scheduler_id
        stream.ledger_number, handles = self._ledger.open_stream(self._clock.now)
        if self._ledger.suspects.is_controlling:
            self.num_controls += 1
            self._hear(stream)
        delays = sorted(self._rng.uniform(0.0, _RESUBMIT_S) for _ in handles)
        for handle, delay in zip(handles, delays, strict=True):
            if handle in self._was_submitted:
                self._clock.after(delay, partial(self._submit, handle))

    def _note_weights(self, weights_digest: str) -> None:
        """As `SchedulerClient`: an answer that began with other weights cannot go on."""
        if self._weights_digest not in ("", weights_digest):
            handles = sorted({record.request for record in self._records.values()} & self._was_submitted)
            self._send(exchange_pb2.ExchangeRequest(abort_handles=encode_handles(handles)))
            self._fail_each(self._ledger.fail_begun(ModelChangedError("")))
        self._weights_digest = weights_digest

    def _hear(self, stream: ExchangeStream) -> None:
        """Hear the scheduler's heartbeats while it is the control; they are simulated for nothing else."""
        if stream is not self._stream or not self._ledger.suspects.is_controlling:
            return
        if stream.is_answering:
            self._ledger.note_heard(self._clock.now)
            self._submit_released()
        self._clock.after(HEARTBEAT_S, partial(self._hear, stream))

    def _on_cell_info(self, stream: ExchangeStream) -> None:
        if not self._is_open:
            self._open_stream(stream)
        self._knows_cell = True
        for handle in sorted({record.request for record in self._records.values()} - self._was_submitted):
            self._submit(handle)
        self._arm_timer()

    def _submit(self, handle: RequestHandle) -> None:
        """Submit a request, unless it has ended or was already submitted on this stream."""
        request = self._ledger.begin_attempt(handle, self._clock.now)
        if request is not None and self._stream is not None:
            self._was_submitted.add(handle)
            self._stream.send_request(exchange_pb2.ExchangeRequest(submits=[encode_submit(request, self._clock.now)]))
            # A request under trial has a time limit.
            self._arm_timer()

    def _submit_released(self) -> None:
        """Submit the requests that were held back while suspects of a scheduler's death were tried."""
        for handle in self._ledger.take_released():
            if self._knows_cell or handle in self._was_submitted:
                self._submit(handle)

    def _cancel(self, handle: RequestHandle) -> None:
        choices = self._ledger.open_choices(handle) if self.is_alive else []
        if self._ledger.remove(handle):
            self._send(exchange_pb2.ExchangeRequest(abort_handles=encode_handles([handle])))
        for choice in choices:
            record = self._records.pop(choice)
            record.is_cancelled, record.over_at = True, self._clock.now
            self._on_over(record)
        self._end_if_drained()
        self._submit_released()

    def _on_outputs(self, stream: ExchangeStream, outputs: exchange_pb2.Outputs) -> None:
        number = stream.ledger_number
        for start in outputs.starts:
            handle = RequestHandle(start.handle)
            if self._ledger.begin(number, handle):
                self._records[handle].num_cached_tokens = start.num_cached_tokens
        for message in outputs.prompt_logprobs:
            logprobs = read_prompt_logprobs(message.logprobs)
            handle, first_position = RequestHandle(message.handle), int(logprobs.indexes[0])
            num_new = self._ledger.receive_prompt(number, handle, first_position, len(logprobs))
            if num_new:
                self._records[handle].prompt_scores += _scores_of(logprobs.last(num_new))
        handle_to_logprobs = read_row_logprobs(outputs) if outputs.HasField("logprobs") else {}
        ends = {RequestHandle(end.handle): end for end in outputs.ends}
        for handle, first_index, token_ids in read_rows(outputs):
            news = self._ledger.receive(number, handle, first_index, token_ids)
            if news:
                if handle in handle_to_logprobs:
                    self._records[handle].scores += _scores_of(handle_to_logprobs[handle].last(len(news)))
                self._deliver(stream, handle, news, ends.pop(handle, None))
        for handle, end in ends.items():
            self._deliver(stream, handle, (), end)
        self._submit_released()

    def _deliver(
        self,
        stream: ExchangeStream,
        handle: RequestHandle,
        token_ids: Sequence[int],
        end: exchange_pb2.RequestEnd | None,
    ) -> None:
        if end is not None and not self._ledger.end(stream.ledger_number, handle):
            return
        record = self._records[handle]
        finish = _finish_of(end)
        for num_left, token_id in zip(reversed(range(len(token_ids))), token_ids, strict=True):
            record.tokens.append(token_id)
            record.weights_digests.add(self._weights_digest)
            is_silent = not num_left and finish is not None and finish.reason in _SILENT_ENDS
            if token_id == record.plan.text_stop_token and not is_silent:
                self._stop_at(handle, record, is_over=end is not None)
                return
        if end is not None and end.HasField("error"):
            self._end(handle, error=_reason_of(end))
        elif end is not None:
            record.num_completion_tokens = end.num_completion_tokens
            self._end(handle, finish=finish)

    def _stop_at(self, handle: RequestHandle, record: ChoiceRecord, *, is_over: bool) -> None:
        """End a choice at a stop string; the cell is notified unless the choice has ended there too."""
        del record.scores[len(record.tokens) :]
        if not is_over and self._ledger.stop(handle):
            stop_at = exchange_pb2.StopAt(handle=handle, num_tokens=len(record.tokens))
            self._send(exchange_pb2.ExchangeRequest(stop_ats=[stop_at]))
        record.num_completion_tokens = len(record.tokens)
        self._end(handle, finish=Finish(FinishReason.STOP_STRING))

    def _send(self, message: exchange_pb2.ExchangeRequest) -> None:
        if self._stream is not None:
            self._stream.send_request(message)

    def _end_if_drained(self) -> None:
        if self._on_drain_lost is not None and self.is_alive and not self._records:
            self.die()

    def _end(self, handle: RequestHandle, *, finish: Finish | None = None, error: str | None = None) -> None:
        record = self._records.pop(handle)
        assert not record.is_over, "a choice ends twice"
        record.finish, record.error, record.over_at = finish, error, self._clock.now
        self._on_over(record)
        if self._on_drain_lost is not None:
            self._clock.after(0.0, self._end_if_drained)

    def _expire(self) -> None:
        self._fail_each(self._ledger.expire(self._clock.now))
        self._submit_released()
        self._arm_timer()

    def _fail_each(self, ends: Iterable[tuple[RequestHandle, ServiceError]]) -> None:
        for handle, error in ends:
            self._end(handle, error=error.reason)

    def _arm_timer(self) -> None:
        wakeup = self._ledger.next_wakeup()
        if wakeup is not None and (self._timer is None or wakeup < self._timer):
            self._timer = wakeup
            # A far timer alone does not keep the run going.
            is_far = wakeup - self._clock.now > _FAR_S
            self._clock.at(wakeup, lambda: self._on_timer(wakeup), is_background=is_far)

    def _on_timer(self, wakeup: float) -> None:
        if self._timer == wakeup and self.is_alive:
            self._timer = None
            self._expire()


def _finish_of(end: exchange_pb2.RequestEnd | None) -> Finish | None:
    if end is None or end.HasField("error"):
        return None
    stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
    return Finish(_FINISH_REASONS[end.finish_reason], stop_token_id)


def _reason_of(end: exchange_pb2.RequestEnd) -> str:
    info = error_details_pb2.ErrorInfo()
    for detail in end.error.details:
        if detail.Unpack(info):
            return str(info.reason)
    raise AssertionError("an error without a reason")


def _scores_of(logprobs: LogprobColumns) -> list[Scores]:
    entries = list(zip(logprobs.token_ids.tolist(), logprobs.values.tolist(), strict=True))
    ranks = logprobs.ranks.tolist()
    bounds, rank_bounds = pairwise(logprobs.bounds.tolist()), pairwise(logprobs.rank_bounds.tolist())
    return [
        (index, tuple(ranks[slice(*own_ranks)]), tuple(entries[slice(*own_entries)]))
        for index, own_ranks, own_entries in zip(logprobs.indexes.tolist(), rank_bounds, bounds, strict=True)
    ]
