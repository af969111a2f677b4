"""The cell's one decision-maker: events in, actions out.

Sans-I/O: no threads, no sockets, no clock but the `now` it is passed, so that a whole cell can be simulated from
one seed. `server` wraps it and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.batch import Outputs, OutputsByClient, RequestEnd, Step, StepResult
from services.scheduler.events import (
    AbortRequest,
    Action,
    ClientGone,
    ClientMessage,
    CloseClient,
    Deliver,
    DropWorker,
    Event,
    Exit,
    SendStep,
    StepReturned,
    Submission,
    TimePassed,
    WorkerAttached,
    WorkerFacts,
    WorkerLost,
)
from services.scheduler.intake import check_sequence, make_request
from services.scheduler.policy import CacheSettings, SchedulerCounters, SchedulerPolicy
from services.scheduler.requests import Request, RequestTable
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Finish, Sequence
from shared.errors import (
    AbortedByCallError,
    DeadlinePassedError,
    DuplicateRequestError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    ServiceError,
    Violation,
)
from shared.limits import MAX_DRAFT_TOKENS, ModelLimits


@dataclass(frozen=True, slots=True)
class CellState:
    """A moment of the cell, for people and dashboards."""

    ready: bool
    num_waiting: int
    num_running: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    counters: SchedulerCounters


class Engine:
    """Joins clients, scheduler and worker; owns the only mutable state of the cell.

    A worker is held for an epoch, which ends when the link breaks, when an answer makes no sense, or when none comes
    in time. Its requests then wait, with the tokens they have, for the next worker; their clients are told nothing.

    Each choice of a request is a sequence, and ends by itself; what ends the request ends all of them.

    Invariant: a choice is known here from its submission until its end has been handed to its client, the client has
    aborted its request, or a later attempt of the same request has taken its place.
    """

    def __init__(self, policy: SchedulerPolicy, cache: CacheSettings) -> None:
        self._policy = policy
        self._cache = cache
        self._counters = SchedulerCounters()
        self._scheduler = Scheduler(policy, cache, self._counters)
        # The last worker that was attached, and its epoch while it still is.
        self._facts: WorkerFacts | None = None
        self._epoch: int | None = None
        self._requests = RequestTable()

    @property
    def is_ready(self) -> bool:
        """Whether a worker is attached."""
        return self._epoch is not None

    @property
    def model(self) -> WorkerFacts | None:
        """What the cell serves; None until a worker has been attached for the first time."""
        return self._facts

    @property
    def model_limits(self) -> ModelLimits | None:
        """What requests are held to; None until a worker has been attached for the first time."""
        if self._facts is None:
            return None
        num_pool_tokens = self._facts.num_blocks * self._cache.block_size
        return ModelLimits(self._facts.context_length, self._facts.logits_width, num_pool_tokens)

    def next_wakeup(self) -> float | None:
        """When a `TimePassed` is due, unless an event comes before: a request's deadline, or the worker's."""
        request, worker = self._requests.first_deadline, self._scheduler.step_deadline
        return worker if request is None or (worker is not None and worker < request) else request

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Take in what happened at `now` (seconds of a monotonic clock) and return what is to be done, in order."""
        actions = self._expire(now)
        match event:
            case StepReturned(result):
                actions += self._on_step_returned(result, now)
            case ClientMessage():
                actions += self._on_client_message(event, now)
            case ClientGone(client):
                for request in self._requests.of_client(client):
                    self._abort(request, now)
            case AbortRequest(request_id):
                actions += self._on_abort_request(request_id, now)
            case WorkerAttached(facts):
                actions += self._on_worker_attached(facts, now)
            case WorkerLost(epoch):
                self._end_epoch(epoch, now)
            case TimePassed():
                actions += self._check_worker(now)
        return actions + self._send_ahead(now)

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; returns the blocks that held one. Requests in flight go on."""
        return self._scheduler.blocks.flush()

    def state(self) -> CellState:
        """The state now."""
        blocks = self._scheduler.blocks
        return CellState(
            ready=self.is_ready,
            num_waiting=len(self._scheduler.waiting),
            num_running=self._scheduler.num_running,
            block_size=self._cache.block_size,
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_blocks - blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_free_blocks=blocks.num_free_blocks,
            counters=self._counters,
        )

    def check_integrity(self) -> None:
        """Assert that everything the cell holds agrees."""
        self._requests.check_integrity()
        assert self._requests.choices() == set(self._scheduler.unfinished()), "a choice is forgotten, or goes on"
        assert self.is_ready or not self._scheduler.num_running, "somebody runs without a worker"
        self._scheduler.check_integrity()

    def _expire(self, now: float) -> list[Action]:
        """End the requests whose callers have given up."""
        first = self._requests.first_deadline
        if first is None or first > now:
            return []
        outputs = OutputsByClient()
        for request in self._requests.passed(now):
            self._fail(request, DeadlinePassedError("the request's deadline passed"), outputs, now)
        return _deliver(outputs)

    def _on_worker_attached(self, facts: WorkerFacts, now: float) -> list[Action]:
        if not self._policy.enable_chunked_prefill and self._policy.max_num_batched_tokens < facts.context_length:
            # A prompt of the full context could never be computed.
            return [Exit(f"max_num_batched_tokens is below the model's context of {facts.context_length}")]
        if self._facts is not None and self._facts.model_digest != facts.model_digest:
            return [DropWorker(facts.epoch, "it serves another model")]
        if facts.num_draft_tokens > MAX_DRAFT_TOKENS:
            return [DropWorker(facts.epoch, f"it drafts more than {MAX_DRAFT_TOKENS} tokens")]
        if self._epoch is not None:
            self._end_epoch(self._epoch, now)
        self._facts = facts
        self._epoch = facts.epoch
        self._scheduler.begin_epoch(facts)
        return self._check_waiting(now)

    def _check_waiting(self, now: float) -> list[Action]:
        """End the waiting requests that this worker cannot serve, or that turn out to have ended before."""
        outputs = OutputsByClient()
        for seq in list(self._scheduler.waiting):
            try:
                finish = self._check_sequence(seq)
            except ServiceError as error:
                self._scheduler.abort(seq, now)
                end = RequestEnd(seq.handle, error=error)
            else:
                if finish is None:
                    continue
                end = self._scheduler.finish(seq, finish, now)
            self._requests.remove_choice(seq.client, seq.handle)
            outputs.add_end(seq.client, end)
        return _deliver(outputs)

    def _end_epoch(self, epoch: int, now: float) -> None:
        if self._epoch == epoch:
            self._epoch = None
            self._counters.num_lost_epochs += 1
            self._scheduler.end_epoch(now)

    def _check_worker(self, now: float) -> list[Action]:
        """Give the worker up when the result of a step is overdue."""
        deadline = self._scheduler.step_deadline
        if self._epoch is None or deadline is None or now < deadline:
            return []
        return self._drop_worker("no result came in time", now)

    def _drop_worker(self, reason: str, now: float) -> list[Action]:
        assert self._epoch is not None
        epoch = self._epoch
        self._end_epoch(epoch, now)
        return [DropWorker(epoch, reason)]

    def _on_step_returned(self, result: StepResult, now: float) -> list[Action]:
        if result.epoch != self._epoch or result.step_id <= self._scheduler.last_returned_step_id:
            # Late, or a repeat.
            return []
        nonsense = self._find_nonsense(result)
        if nonsense is not None:
            return self._drop_worker(nonsense, now)
        outputs = self._scheduler.postprocess(result, now)
        for client, client_outputs in outputs.by_client.items():
            for end in client_outputs.ends:
                self._requests.remove_choice(client, end.handle)
        return _deliver(outputs)

    def _find_nonsense(self, result: StepResult) -> str | None:
        """Why a result cannot be an answer to the oldest step in flight; None when it can."""
        assert self._facts is not None
        return self._scheduler.find_nonsense(result, self._facts.logits_width)

    def _on_client_message(self, message: ClientMessage, now: float) -> list[Action]:
        client = message.client
        ends: list[RequestEnd] = []
        for submission in message.submissions:
            if self._requests.is_taken(client, submission.handle, submission.n):
                return [CloseClient(client, InvalidRequestError("a handle was used twice"))]
            try:
                ends += self._submit(client, submission, now)
            except ServiceError as error:
                ends += [RequestEnd(submission.handle + choice, error=error) for choice in submission.open_choices]
        for handle, num_tokens in message.stop_ats:
            seq = self._requests.remove_choice(client, handle)
            if seq is not None:
                ends.append(self._scheduler.stop_at(seq, num_tokens, now))
        for handle in message.aborts:
            request = self._requests.by_handle(client, handle)
            if request is not None:
                self._abort(request, now)
        return [Deliver(client, Outputs.only_ends(ends))] if ends else []

    def _on_abort_request(self, request_id: str, now: float) -> list[Action]:
        request = self._requests.by_id(request_id)
        if request is None:
            return []
        outputs = OutputsByClient()
        self._fail(request, AbortedByCallError("another call aborted the request"), outputs, now)
        return _deliver(outputs)

    def _submit(self, client: int, submission: Submission, now: float) -> list[RequestEnd]:
        """Check a request and queue its choices; a later attempt takes the place of an earlier one.

        Returns:
            The ends of choices whose output so far shows that they had ended.

        Raises:
            ServiceError: it cannot be served; nothing has changed.
        """
        if self._facts is None and submission.attempt == 1:
            raise NotReadyError("no worker has been attached yet")
        earlier = self._requests.by_id(submission.request_id)
        if earlier is not None and earlier.attempt >= submission.attempt:
            raise DuplicateRequestError("a request with this id is in flight", request_id=submission.request_id)
        if submission.time_left_s is not None and submission.time_left_s <= 0:
            raise DeadlinePassedError("the request's deadline passed")
        request = make_request(client, submission, now)
        finishes = [(seq, self._check_sequence(seq)) for seq in request.choices]
        self._check_room(request, now)
        if earlier is not None:
            self._abort(earlier, now)
        request.choices = [seq for seq, finish in finishes if finish is None]
        if request.choices:
            self._queue(request, now)
        return [
            RequestEnd(seq.handle, seq.num_stored_tokens - seq.num_prompt_tokens, finish)
            for seq, finish in finishes
            if finish is not None
        ]

    def _queue(self, request: Request, now: float) -> None:
        self._requests.add(request)
        for number, seq in enumerate(request.choices):
            seq.is_leader = not number
            self._scheduler.waiting.add(seq, now)

    def _check_sequence(self, seq: Sequence) -> Finish | None:
        """Check a waiting sequence against the model; without a model yet, nothing is checked.

        Returns:
            Why its output so far ends it; None when it goes on.

        Raises:
            ServiceError: it cannot be served.
        """
        limits = self.model_limits
        if limits is None:
            return None
        check_sequence(seq, limits)
        return self._scheduler.find_finish(seq) if seq.num_stored_tokens > seq.num_prompt_tokens else None

    def _check_room(self, request: Request, now: float) -> None:
        """Refuse a request for which there is no room; one that was admitted before is held to no queue bound.

        Raises:
            QueueFullError: there is none now.
            InvalidRequestError: the log-probabilities of its prompt come to more bytes than there may ever be.
        """
        num_bytes, max_bytes = request.num_prompt_logprob_bytes, self._policy.max_prompt_logprob_bytes
        if num_bytes > max_bytes:
            rule = f"come to {num_bytes} bytes for this prompt, at most {max_bytes} are possible"
            violation = Violation("sampling.num_prompt_logprobs", "OUT_OF_RANGE", rule)
            raise InvalidRequestError.from_violations([violation])
        if request.attempt > 1 or not request.choices:
            return
        waiting = self._scheduler.waiting
        waiting.check_room(request.choices[0].num_prompt_tokens, now, num_choices=len(request.choices))
        if num_bytes and self._requests.num_prompt_logprob_bytes + num_bytes > max_bytes:
            raise QueueFullError(
                "too many log-probabilities of prompts are asked for",
                retry_delay_s=waiting.retry_delay_s(1, now),
                num_bytes=self._requests.num_prompt_logprob_bytes,
            )

    def _abort(self, request: Request, now: float) -> list[Sequence]:
        """Forget a request; returns its choices, which had not ended."""
        choices = self._requests.remove(request)
        for seq in choices:
            self._scheduler.abort(seq, now)
        return choices

    def _fail(self, request: Request, error: ServiceError, outputs: OutputsByClient, now: float) -> None:
        """End each choice of a request with an error."""
        for seq in self._abort(request, now):
            outputs.add_end(seq.client, RequestEnd(seq.handle, error=error))

    def _send_ahead(self, now: float) -> list[Action]:
        if self._epoch is None:
            return []
        actions: list[Action] = []
        while (scheduled := self._scheduler.schedule(now)) is not None:
            step_id, batch = scheduled
            actions.append(SendStep(Step(self._epoch, step_id, batch)))
        return actions


def _deliver(outputs: OutputsByClient) -> list[Action]:
    return [Deliver(client, client_outputs) for client, client_outputs in outputs.by_client.items()]
