"""The cell's one decision-maker: events in, actions out.

Sans-I/O: no threads, no sockets, no clock but the `now` it is passed, so that a whole cell can be simulated from
one seed. `server` wraps it and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.scheduler.batch import Outputs, RequestEnd, Step, StepResult
from services.scheduler.block_manager import BlockManager
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
from services.scheduler.policy import SchedulerCounters, SchedulerPolicy
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence
from shared.errors import (
    AbortedByCallError,
    DuplicateRequestError,
    InvalidRequestError,
    NotReadyError,
    ServiceError,
)
from shared.limits import TOKEN_DTYPE, ModelLimits, check_fit, check_prompt, check_sampling


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How KV blocks are used."""

    block_size: int = 16
    enable_prefix_caching: bool = True


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

    Invariant: a request is known here from its submission until its end has been handed to its client, or the
    client has aborted it.
    """

    def __init__(self, policy: SchedulerPolicy, cache: CacheSettings) -> None:
        self._policy = policy
        self._cache = cache
        self._counters = SchedulerCounters()
        self._worker: WorkerFacts | None = None
        self._scheduler: Scheduler | None = None
        self._requests: dict[tuple[int, int], Sequence] = {}
        self._request_id_to_seq: dict[str, Sequence] = {}

    @property
    def worker(self) -> WorkerFacts | None:
        """The attached worker."""
        return self._worker

    @property
    def model_limits(self) -> ModelLimits | None:
        """What requests are held to; None without a worker."""
        if self._worker is None:
            return None
        num_pool_tokens = self._worker.num_blocks * self._cache.block_size
        return ModelLimits(self._worker.context_length, self._worker.logits_width, num_pool_tokens)

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Take in what happened at `now` (seconds of a monotonic clock) and return what is to be done, in order."""
        match event:
            case StepReturned(result):
                return self._on_step_returned(result, now)
            case ClientMessage():
                return self._on_client_message(event, now)
            case ClientGone(client):
                return self._on_client_gone(client, now)
            case AbortRequest(request_id):
                return self._on_abort_request(request_id, now)
            case WorkerAttached(facts):
                return self._on_worker_attached(facts)
            case WorkerLost(epoch):
                return self._on_worker_lost(epoch)
            case TimePassed():
                return self._send_ahead(now)

    def state(self) -> CellState:
        """The state now."""
        blocks = self._scheduler.blocks if self._scheduler else None
        return CellState(
            ready=self._worker is not None,
            num_waiting=len(self._scheduler.waiting) if self._scheduler else 0,
            num_running=self._scheduler.num_running if self._scheduler else 0,
            block_size=self._cache.block_size,
            num_blocks=blocks.num_blocks if blocks else 0,
            num_used_blocks=blocks.num_blocks - blocks.num_free_blocks if blocks else 0,
            num_cached_blocks=blocks.num_cached_blocks if blocks else 0,
            num_free_blocks=blocks.num_free_blocks if blocks else 0,
            counters=self._counters,
        )

    def check_integrity(self) -> None:
        """Assert that everything the cell holds agrees."""
        assert {seq.id: seq for seq in self._requests.values()} == self._request_id_to_seq, "request ids"
        if self._scheduler is not None:
            self._scheduler.check_integrity()

    def _on_worker_attached(self, facts: WorkerFacts) -> list[Action]:
        if not self._policy.enable_chunked_prefill and self._policy.max_num_batched_tokens < facts.context_length:
            # A prompt of the full context could never be computed.
            return [Exit(f"max_num_batched_tokens is below the model's context of {facts.context_length}")]
        self._worker = facts
        blocks = BlockManager(
            facts.num_blocks, self._cache.block_size, enable_prefix_caching=self._cache.enable_prefix_caching
        )
        self._scheduler = Scheduler(self._policy, blocks, frozenset(facts.eos_token_ids), self._counters)
        return []

    def _on_worker_lost(self, epoch: int) -> list[Action]:
        if self._worker is None or self._worker.epoch != epoch:
            return []
        self._worker = self._scheduler = None
        actions: list[Action] = []
        for client in sorted({client for client, _ in self._requests}):
            error = NotReadyError("the worker was lost")
            ends = [RequestEnd(handle, error=error) for owner, handle in self._requests if owner == client]
            actions.append(Deliver(client, Outputs.only_ends(ends)))
        self._requests.clear()
        self._request_id_to_seq.clear()
        return actions

    def _on_step_returned(self, result: StepResult, now: float) -> list[Action]:
        if self._worker is None or self._scheduler is None or result.epoch != self._worker.epoch:
            return []
        nonsense = self._find_nonsense(result)
        if nonsense is not None:
            return [*self._on_worker_lost(result.epoch), DropWorker(result.epoch, nonsense)]
        outputs = self._scheduler.postprocess(result.token_ids, result.not_finite_rows, now)
        for client, client_outputs in outputs.items():
            self._forget(client, client_outputs.ends)
        return [
            *(Deliver(client, client_outputs) for client, client_outputs in outputs.items()),
            *self._send_ahead(now),
        ]

    def _find_nonsense(self, result: StepResult) -> str | None:
        """Why a result cannot be an answer to the oldest step in flight; None when it can."""
        assert self._worker is not None
        assert self._scheduler is not None
        in_flight = self._scheduler.in_flight
        if not in_flight or result.step_id != in_flight[0].step_id:
            return f"result of step {result.step_id}, which is not the next"
        num_rows = len(in_flight[0].row_slots)
        if len(result.token_ids) != num_rows:
            return f"{len(result.token_ids)} tokens for {num_rows} rows"
        if num_rows and not 0 <= int(result.token_ids.min()) <= int(result.token_ids.max()) < self._worker.logits_width:
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
                self._submit(message.client, submission, now)
            except ServiceError as error:
                ends.append(RequestEnd(submission.handle, error=error))
        for handle, num_tokens in message.stop_ats:
            seq = self._pop(message.client, handle)
            if seq is not None and self._scheduler is not None:
                ends.append(self._scheduler.stop_at(seq, num_tokens, now))
        self._abort(message.client, message.aborts, now)
        actions: list[Action] = [Deliver(message.client, Outputs.only_ends(ends))] if ends else []
        return actions + self._send_ahead(now)

    def _on_client_gone(self, client: int, now: float) -> list[Action]:
        self._abort(client, [handle for owner, handle in self._requests if owner == client], now)
        return self._send_ahead(now)

    def _on_abort_request(self, request_id: str, now: float) -> list[Action]:
        seq = self._request_id_to_seq.get(request_id)
        if seq is None:
            return []
        self._abort(seq.client, [seq.handle], now)
        end = RequestEnd(seq.handle, error=AbortedByCallError("another call aborted the request"))
        return [Deliver(seq.client, Outputs.only_ends([end])), *self._send_ahead(now)]

    def _submit(self, client: int, submission: Submission, now: float) -> None:
        """Check a request and queue it.

        Raises:
            ServiceError: it cannot be served; nothing has changed.
        """
        limits = self.model_limits
        if limits is None or self._scheduler is None:
            raise NotReadyError("no worker is attached")
        if submission.request_id in self._request_id_to_seq:
            raise DuplicateRequestError("a request with this id is in flight", request_id=submission.request_id)
        prompt = np.frombuffer(submission.prompt, TOKEN_DTYPE)
        check_sampling(submission.params, limits)
        check_prompt(prompt, limits)
        check_fit(len(prompt), submission.params.max_tokens, limits)
        self._scheduler.waiting.check_room(len(prompt), now)
        seq = Sequence(
            submission.request_id,
            client,
            submission.handle,
            submission.params,
            bytearray(submission.prompt),
            len(prompt),
            now,
        )
        self._requests[client, submission.handle] = seq
        self._request_id_to_seq[seq.id] = seq
        self._scheduler.add(seq)

    def _abort(self, client: int, handles: Iterable[int], now: float) -> None:
        for handle in handles:
            seq = self._pop(client, handle)
            if seq is not None and self._scheduler is not None:
                self._scheduler.abort(seq, now)

    def _forget(self, client: int, ends: Iterable[RequestEnd]) -> None:
        for end in ends:
            self._pop(client, end.handle)

    def _pop(self, client: int, handle: int) -> Sequence | None:
        seq = self._requests.pop((client, handle), None)
        if seq is not None:
            del self._request_id_to_seq[seq.id]
        return seq

    def _send_ahead(self, now: float) -> list[Action]:
        if self._scheduler is None or self._worker is None:
            return []
        actions: list[Action] = []
        while (scheduled := self._scheduler.schedule(now)) is not None:
            step_id, batch = scheduled
            actions.append(SendStep(Step(self._worker.epoch, step_id, batch)))
        return actions
