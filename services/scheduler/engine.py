"""The cell's one decision-maker: events in, actions out.

Sans-I/O: no threads, no sockets, no clock but the `now` it is passed, so that a whole cell can be simulated from
one seed. `server` wraps it and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.scheduler.batch import Outputs, OutputsByClient, RequestEnd, Step, StepResult
from services.scheduler.deadlines import Deadlines
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
from services.scheduler.policy import CacheSettings, SchedulerCounters, SchedulerPolicy
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Finish, Sequence
from shared.errors import (
    AbortedByCallError,
    DeadlinePassedError,
    DuplicateRequestError,
    InvalidRequestError,
    NotReadyError,
    ServiceError,
    Violation,
)
from shared.limits import TOKEN_DTYPE, ModelLimits, check_fit, check_prompt, check_sampling, check_token_ids


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

    Invariant: a request is known here from its submission until its end has been handed to its client, the client
    has aborted it, or a later attempt of the same request has taken its place.
    """

    def __init__(self, policy: SchedulerPolicy, cache: CacheSettings) -> None:
        self._policy = policy
        self._cache = cache
        self._counters = SchedulerCounters()
        self._scheduler = Scheduler(policy, cache, self._counters)
        # The last worker that was attached, and its epoch while it still is.
        self._facts: WorkerFacts | None = None
        self._epoch: int | None = None
        self._requests: dict[tuple[int, int], Sequence] = {}
        self._request_id_to_seq: dict[str, Sequence] = {}
        self._deadlines = Deadlines()

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
        request, worker = self._deadlines.first, self._scheduler.step_deadline
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
                self._abort(client, [handle for owner, handle in self._requests if owner == client], now)
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
        assert {seq.id: seq for seq in self._requests.values()} == self._request_id_to_seq, "request ids"
        num_deadlines = sum(seq.deadline is not None for seq in self._requests.values())
        assert len(self._deadlines) == num_deadlines, "deadlines"
        assert self.is_ready or not self._scheduler.num_running, "somebody runs without a worker"
        self._scheduler.check_integrity()

    def _expire(self, now: float) -> list[Action]:
        """End the requests whose callers have given up."""
        first = self._deadlines.first
        if first is None or first > now:
            return []
        outputs = OutputsByClient()
        for client, handle in self._deadlines.pop_passed(now):
            self._abort(client, [handle], now)
            outputs.add_end(client, RequestEnd(handle, error=DeadlinePassedError("the request's deadline passed")))
        return _deliver(outputs)

    def _on_worker_attached(self, facts: WorkerFacts, now: float) -> list[Action]:
        if not self._policy.enable_chunked_prefill and self._policy.max_num_batched_tokens < facts.context_length:
            # A prompt of the full context could never be computed.
            return [Exit(f"max_num_batched_tokens is below the model's context of {facts.context_length}")]
        if self._facts is not None and self._facts.model_digest != facts.model_digest:
            return [DropWorker(facts.epoch, "it serves another model")]
        if self._epoch is not None:
            self._end_epoch(self._epoch, now)
        self._facts = facts
        self._epoch = facts.epoch
        self._scheduler.begin_epoch(facts.num_blocks, frozenset(facts.eos_token_ids))
        return self._check_waiting(now)

    def _check_waiting(self, now: float) -> list[Action]:
        """End the waiting requests that this worker cannot serve, or that turn out to have ended before."""
        outputs = OutputsByClient()
        for seq in list(self._scheduler.waiting):
            try:
                finish = self._check_sequence(seq)
            except ServiceError as error:
                self._abort(seq.client, [seq.handle], now)
                outputs.add_end(seq.client, RequestEnd(seq.handle, error=error))
                continue
            if finish is not None:
                self._pop(seq.client, seq.handle)
                outputs.add_end(seq.client, self._scheduler.finish(seq, finish, now))
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
                self._pop(client, end.handle)
        return _deliver(outputs)

    def _find_nonsense(self, result: StepResult) -> str | None:
        """Why a result cannot be an answer to the oldest step in flight; None when it can."""
        assert self._facts is not None
        record = self._scheduler.oldest_in_flight
        if record is None or result.step_id != record.step_id:
            return f"result of step {result.step_id}, which is not the next"
        num_rows = len(record.row_slots)
        if len(result.token_ids) != num_rows:
            return f"{len(result.token_ids)} tokens for {num_rows} rows"
        # As unsigned numbers, negative ones are too large as well.
        if num_rows and result.token_ids.view(np.uint32).max() >= self._facts.logits_width:
            return "a token id is out of range"
        rows = result.not_finite_rows
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            return "a row number is out of range"
        return None

    def _on_client_message(self, message: ClientMessage, now: float) -> list[Action]:
        ends: list[RequestEnd] = []
        for submission in message.submissions:
            if (message.client, submission.handle) in self._requests:
                return [CloseClient(message.client, InvalidRequestError("a handle was used twice"))]
            try:
                end = self._submit(message.client, submission, now)
            except ServiceError as error:
                end = RequestEnd(submission.handle, error=error)
            if end is not None:
                ends.append(end)
        for handle, num_tokens in message.stop_ats:
            seq = self._pop(message.client, handle)
            if seq is not None:
                ends.append(self._scheduler.stop_at(seq, num_tokens, now))
        self._abort(message.client, message.aborts, now)
        return [Deliver(message.client, Outputs.only_ends(ends))] if ends else []

    def _on_abort_request(self, request_id: str, now: float) -> list[Action]:
        seq = self._request_id_to_seq.get(request_id)
        if seq is None:
            return []
        self._abort(seq.client, [seq.handle], now)
        end = RequestEnd(seq.handle, error=AbortedByCallError("another call aborted the request"))
        return [Deliver(seq.client, Outputs.only_ends([end]))]

    def _submit(self, client: int, submission: Submission, now: float) -> RequestEnd | None:
        """Check a request and queue it; a later attempt takes the place of an earlier one.

        Returns:
            Its end, when its output so far shows that it had ended; else None.

        Raises:
            ServiceError: it cannot be served; nothing has changed.
        """
        if self._facts is None and submission.attempt == 1:
            raise NotReadyError("no worker has been attached yet")
        earlier = self._request_id_to_seq.get(submission.request_id)
        if earlier is not None and earlier.attempt >= submission.attempt:
            raise DuplicateRequestError("a request with this id is in flight", request_id=submission.request_id)
        if submission.time_left_s is not None and submission.time_left_s <= 0:
            raise DeadlinePassedError("the request's deadline passed")
        seq = _make_sequence(client, submission, now)
        finish = self._check_sequence(seq)
        if submission.attempt == 1:
            self._scheduler.waiting.check_room(seq.num_prompt_tokens, now)
        if earlier is not None:
            self._abort(earlier.client, [earlier.handle], now)
        if finish is not None:
            return RequestEnd(seq.handle, seq.num_stored_tokens - seq.num_prompt_tokens, finish)
        self._requests[client, seq.handle] = seq
        self._request_id_to_seq[seq.id] = seq
        if seq.deadline is not None:
            self._deadlines.add((client, seq.handle), seq.deadline)
        self._scheduler.waiting.add(seq, now)
        return None

    def _check_sequence(self, seq: Sequence) -> Finish | None:
        """Check a waiting request against the model; without a model yet, nothing is checked.

        Returns:
            Why its output so far ends it; None when it goes on.

        Raises:
            ServiceError: it cannot be served.
        """
        limits = self.model_limits
        if limits is None:
            return None
        tokens = np.frombuffer(seq.token_bytes, TOKEN_DTYPE)
        prompt, output = tokens[: seq.num_prompt_tokens], tokens[seq.num_prompt_tokens :]
        check_sampling(seq.params, limits)
        check_prompt(prompt, limits)
        check_fit(len(prompt), seq.params.max_tokens, limits)
        if not output.size:
            return None
        check_token_ids(output, limits.logits_width, field="output")
        if len(output) > seq.params.max_tokens:
            violation = Violation("output", "OUT_OF_RANGE", f"at most {seq.params.max_tokens} tokens")
            raise InvalidRequestError.from_violations([violation])
        return self._scheduler.find_finish(seq)

    def _abort(self, client: int, handles: Iterable[int], now: float) -> None:
        for handle in handles:
            seq = self._pop(client, handle)
            if seq is not None:
                self._scheduler.abort(seq, now)

    def _pop(self, client: int, handle: int) -> Sequence | None:
        seq = self._requests.pop((client, handle), None)
        if seq is not None:
            del self._request_id_to_seq[seq.id]
            self._deadlines.discard((client, handle))
        return seq

    def _send_ahead(self, now: float) -> list[Action]:
        if self._epoch is None:
            return []
        actions: list[Action] = []
        while (scheduled := self._scheduler.schedule(now)) is not None:
            step_id, batch = scheduled
            actions.append(SendStep(Step(self._epoch, step_id, batch)))
        return actions


def _make_sequence(client: int, submission: Submission, now: float) -> Sequence:
    tokens = bytearray(submission.prompt)
    tokens += submission.output
    return Sequence(
        submission.request_id,
        client,
        submission.handle,
        submission.params,
        tokens,
        len(submission.prompt) // TOKEN_DTYPE.itemsize,
        now - submission.age_s,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        attempt=submission.attempt,
        deadline=None if submission.time_left_s is None else now + submission.time_left_s,
    )


def _deliver(outputs: OutputsByClient) -> list[Action]:
    return [Deliver(client, client_outputs) for client, client_outputs in outputs.by_client.items()]
