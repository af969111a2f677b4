"""Bugs that the simulation must see: each takes one thing out of the real classes, or turns it wrong.

One that survives its seeds means that a schedule of faults is missing, or that what it took out is not needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.scheduler.block_manager import BlockManager
from services.scheduler.engine import Engine
from services.scheduler.events import Action, ClientGone, Event, Submission, TimePassed
from services.scheduler.preemption import Preemption
from services.scheduler.prefill import Prefill, PrefillPlanner
from services.scheduler.prefix_cache import CachedPrefix
from services.scheduler.running_batch import RunningBatch
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import TOKEN_BYTES, Sequence, SequenceStatus
from services.scheduler.slot_table import SlotTable
from services.scheduler.step_deadline import StepDeadline
from services.scheduler.waiting_queue import WaitingQueue
from services.tokenizer.request_ledger import RequestLedger
from tests.simulation.faults import Fault
from tests.simulation.worker import SimulatedWorker

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug, what it breaks, and the kinds of faults under which it must show."""

    name: str
    breaks: str
    kinds: tuple[Fault, ...]
    plant: Callable[[Patch], None]


PLANTED_BUGS: list[PlantedBug] = []

Plant = Callable[[Patch], None]


def _planted(*kinds: Fault) -> Callable[[Plant], Plant]:
    """Enter a function that plants a bug; its docstring says what it breaks."""

    def enter(plant: Plant) -> Plant:
        PLANTED_BUGS.append(PlantedBug(plant.__name__.strip("_"), plant.__doc__ or "", kinds, plant))
        return plant

    return enter


# Results and epochs.


@_planted(Fault.RESULT_REPEATED)
def _repeated_results_count(patch: Patch) -> None:
    """A result that was taken in before passes for the next one's."""
    find_nonsense = Engine._find_nonsense

    def find(self: Engine, result: Any) -> str | None:
        record = self._scheduler.oldest_in_flight
        return find_nonsense(self, result if record is None else replace(result, step_id=record.step_id))

    patch.setattr(Scheduler, "last_returned_step_id", 0)
    patch.setattr(Engine, "_find_nonsense", find)


@_planted(Fault.RESULT_LATE, Fault.LINK_BREAK, Fault.WORKER_CRASH)
def _results_of_old_epochs_count(patch: Patch) -> None:
    """A result of an epoch that has ended passes for the present one's."""
    on_step_returned = Engine._on_step_returned
    patch.setattr(
        Engine,
        "_on_step_returned",
        lambda self, result, now: on_step_returned(self, replace(result, epoch=self._epoch), now),
    )


@_planted(Fault.RESULT_NONSENSE, Fault.RESULT_REORDERED)
def _nonsense_counts(patch: Patch) -> None:
    """A result is not checked: tokens that do not exist, too many of them, another step's."""
    patch.setattr(Engine, "_find_nonsense", lambda *_: None)


@_planted(Fault.WORKER_HANG, Fault.RESULT_LOST)
def _no_step_deadline(patch: Patch) -> None:
    """A worker that answers no more is waited for."""
    patch.setattr(StepDeadline, "time", None)


@_planted(Fault.SCHEDULER_RESTART, Fault.SCHEDULER_ZOMBIE)
def _zombie_not_fenced(patch: Patch) -> None:
    """The worker runs the steps of a scheduler that another one has replaced."""
    patch.setattr(SimulatedWorker, "_accepts", lambda *_: True)


@_planted(Fault.LINK_BREAK, Fault.WORKER_CRASH)
def _cache_survives_the_worker(patch: Patch) -> None:
    """The index of prefixes is kept when the next worker begins with empty cells."""
    void = RunningBatch.void
    kept: list[BlockManager] = []

    def free_all(self: RunningBatch) -> list[Sequence]:
        for seq in [*self.sequences(), *self.retiring()]:
            self.blocks.free(seq)
        return void(self)

    def make(num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> BlockManager:
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        if not num_blocks:
            return blocks
        kept.append(blocks)
        return kept[0]

    patch.setattr(RunningBatch, "void", free_all)
    patch.setattr("services.scheduler.scheduler.BlockManager", make)


@_planted(Fault.LINK_BREAK)
def _placeholders_stay_when_an_epoch_ends(patch: Patch) -> None:
    """A sequence that is requeued keeps the tokens that its void steps were to bring."""
    void = RunningBatch.void

    def keep(self: RunningBatch) -> list[Sequence]:
        self.slots.num_tokens[:] = self.slots.num_planned
        return void(self)

    patch.setattr(RunningBatch, "void", keep)


@_planted(Fault.LINK_BREAK)
def _tokens_are_lost_when_an_epoch_ends(patch: Patch) -> None:
    """A sequence that is requeued forgets the tokens that were not stored yet, which its client has."""
    void = RunningBatch.void

    def forget(self: RunningBatch) -> list[Sequence]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SlotTable, "flush", lambda *_: None)
            return void(self)

    patch.setattr(RunningBatch, "void", forget)


@_planted(Fault.LINK_BREAK)
def _parked_sequences_are_lost_when_an_epoch_ends(patch: Patch) -> None:
    """Only those that run are requeued, not those whose last rows are in flight."""
    void = RunningBatch.void

    def forget(self: RunningBatch) -> list[Sequence]:
        running = self.sequences()
        return [seq for seq in void(self) if seq in running]

    patch.setattr(RunningBatch, "void", forget)


# Blocks and the prefix cache.


@_planted(Fault.CANCEL)
def _blocks_of_cancelled_requests_leak(patch: Patch) -> None:
    """A request that is cancelled with a step in flight keeps its blocks."""
    free = BlockManager.free

    def leak(self: BlockManager, seq: Sequence) -> None:
        if seq.status is SequenceStatus.EXIT_ENGINE:
            seq.block_table = array("i")
        else:
            free(self, seq)

    patch.setattr(BlockManager, "free", leak)


@_planted()
def _retiring_sequences_give_back_at_once(patch: Patch) -> None:
    """Slots and blocks are reused while steps in flight still name them."""
    patch.setattr(RunningBatch, "_last_record_of", lambda *_: None)


@_planted(Fault.CANCEL)
def _blocks_are_published_at_admission(patch: Patch) -> None:
    """The blocks of a prompt's later chunks can be found before a step that computes them is sent."""
    try_allocate = BlockManager.try_allocate

    def publish(self: BlockManager, seq: Sequence, prefix: CachedPrefix) -> bool:
        is_allocated = try_allocate(self, seq, prefix)
        if is_allocated:
            self.publish(seq, seq.num_stored_tokens)
        return is_allocated

    patch.setattr(BlockManager, "try_allocate", publish)


@_planted()
def _a_whole_prompt_may_be_cached(patch: Patch) -> None:
    """A prompt of which all is cached leaves no token to compute, so there are no logits to sample from."""
    patch.setattr(
        "services.scheduler.block_manager.BlockManager.find_prefix", _find_prefix_that_leaves_nothing(BlockManager)
    )


def _find_prefix_that_leaves_nothing(manager: type[BlockManager]) -> Callable[[BlockManager, Sequence], CachedPrefix]:
    find_prefix = manager.find_prefix

    def find(self: BlockManager, seq: Sequence) -> CachedPrefix:
        # One more token: the last block of the prompt is no longer held back for it.
        seq.token_bytes += bytes(TOKEN_BYTES)
        prefix = find_prefix(self, seq)
        del seq.token_bytes[-TOKEN_BYTES:]
        return prefix

    return find


@_planted()
def _one_cached_block_too_many(patch: Patch) -> None:
    """A prefix counts for one block more than is shared, which is then never computed."""
    find_prefix = BlockManager.find_prefix

    def find(self: BlockManager, seq: Sequence) -> CachedPrefix:
        prefix = find_prefix(self, seq)
        num_tokens = prefix.num_tokens + self.block_size
        return replace(prefix, num_tokens=num_tokens) if num_tokens < seq.num_stored_tokens else prefix

    patch.setattr(BlockManager, "find_prefix", find)


@_planted()
def _salts_are_ignored(patch: Patch) -> None:
    """Requests of different salts share prefixes."""
    find_prefix = BlockManager.find_prefix

    def find(self: BlockManager, seq: Sequence) -> CachedPrefix:
        seq.cache_salt = b""
        return find_prefix(self, seq)

    patch.setattr(BlockManager, "find_prefix", find)


@_planted(Fault.NOT_FINITE)
def _bad_kv_stays_cached(patch: Patch) -> None:
    """What a request computed whose logits were not finite can still be found."""
    patch.setattr(BlockManager, "hide", lambda *_: None)


@_planted(Fault.NOT_FINITE)
def _rows_that_are_not_finite_count(patch: Patch) -> None:
    """The token of a row that means nothing goes to its client."""
    patch.setattr(Scheduler, "_fail_not_finite", lambda *_: None)


# Overlap, chunks and preemption.


@_planted()
def _wasted_rows_are_delivered(patch: Patch) -> None:
    """A request that ended gets the token of the row that was in flight."""
    leave = Scheduler._leave

    def stay(self: Scheduler, seq: Sequence, *args: Any) -> None:
        leave(self, seq, *args)
        if seq.slot is not None:
            self._slots.live[seq.slot] = True

    patch.setattr(Scheduler, "_leave", stay)


@_planted()
def _rows_behind_the_last_token(patch: Patch) -> None:
    """A request gets a row more than its tokens and placeholders leave, which can only be wasted."""
    send = RunningBatch.send

    def send_more(self: RunningBatch, *args: Any) -> int:
        self.slots.max_num_tokens += 1
        step_id = send(self, *args)
        self.slots.max_num_tokens -= 1
        return step_id

    patch.setattr(RunningBatch, "send", send_more)


@_planted()
def _parked_sequences_lose_tokens(patch: Patch) -> None:
    """A preempted sequence comes back without what its steps in flight brought."""
    take_back = Preemption.take_back

    def forget(self: Preemption, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RunningBatch, "store", lambda *_: None)
            take_back(self, *args)

    patch.setattr(Preemption, "take_back", forget)


@_planted()
def _preempted_sequences_go_to_the_back(patch: Patch) -> None:
    """A preempted sequence waits as if it had just arrived."""
    preempt = Preemption.preempt

    def preempt_late(self: Preemption, seq: Sequence, now: float) -> None:
        seq.arrive_time = now
        preempt(self, seq, now)

    patch.setattr(Preemption, "preempt", preempt_late)


@_planted()
def _chunks_begin_one_token_late(patch: Patch) -> None:
    """A prompt's later chunks skip a token and repeat the last one."""
    take_tokens = PrefillPlanner._take_tokens

    def skip(self: PrefillPlanner, seq: Sequence, num_tokens: int, prefill: Prefill) -> bytes:
        is_first = seq.slot is None
        tokens = take_tokens(self, seq, num_tokens, prefill)
        return tokens if is_first else tokens[TOKEN_BYTES:] + tokens[-TOKEN_BYTES:]

    patch.setattr(PrefillPlanner, "_take_tokens", skip)


@_planted()
def _steps_exceed_their_budget(patch: Patch) -> None:
    """Prompts get more tokens of a step than it may have."""
    plan = PrefillPlanner.plan
    patch.setattr(
        PrefillPlanner, "plan", lambda self, budget, now, *, may_admit: plan(self, 2 * budget, now, may_admit=may_admit)
    )


@_planted(Fault.WORKER_SLOW)
def _nobody_ages(patch: Patch) -> None:
    """A request that has waited for long goes behind every more urgent one."""
    patch.setattr(WaitingQueue, "next", lambda self, now, cached: self._order.first(now, cached))


# Requests, their ends and their attempts.


@_planted(Fault.TEXT_STOP)
def _stop_positions_are_ignored(patch: Patch) -> None:
    """A request that is stopped in its text counts the tokens that came after the stop."""
    stop_at = Scheduler.stop_at
    patch.setattr(Scheduler, "stop_at", lambda self, seq, _, now: stop_at(self, seq, 1 << 30, now))


@_planted(Fault.DEADLINE)
def _deadlines_are_ignored(patch: Patch) -> None:
    """A request whose caller has given up is computed on."""
    patch.setattr(Engine, "_expire", lambda *_: [])


@_planted(Fault.REPLICA_GONE)
def _requests_outlive_their_replica(patch: Patch) -> None:
    """The requests of a replica that is gone are computed on."""
    on_event = Engine.on_event

    def ignore(self: Engine, event: Event, now: float) -> list[Action]:
        return on_event(self, TimePassed() if isinstance(event, ClientGone) else event, now)

    patch.setattr(Engine, "on_event", ignore)


@_planted(Fault.STREAM_BREAK)
def _later_attempts_are_duplicates(patch: Patch) -> None:
    """A resubmitted request is refused while its earlier attempt is in flight."""
    submit = Engine._submit
    patch.setattr(
        Engine,
        "_submit",
        lambda self, client, submission, now: submit(self, client, replace(submission, attempt=1), now),
    )


@_planted(Fault.STREAM_BREAK)
def _earlier_attempts_run_on(patch: Patch) -> None:
    """Of a resubmitted request both attempts run."""
    submit = Engine._submit

    def submit_beside(self: Engine, client: int, submission: Submission, now: float) -> Any:
        self._request_id_to_seq.pop(submission.request_id, None)
        return submit(self, client, submission, now)

    patch.setattr(Engine, "_submit", submit_beside)


@_planted(Fault.STREAM_BREAK, Fault.SCHEDULER_RESTART)
def _max_tokens_count_from_the_resubmission(patch: Patch) -> None:
    """The output so far counts as prompt: a resumed request gets max_tokens more."""
    submit = Engine._submit

    def submit_as_prompt(self: Engine, client: int, submission: Submission, now: float) -> Any:
        prompt = submission.prompt + submission.output
        return submit(self, client, replace(submission, prompt=prompt, output=b""), now)

    patch.setattr(Engine, "_submit", submit_as_prompt)


@_planted(Fault.STREAM_BREAK, Fault.DEADLINE)
def _resubmission_extends_the_deadline(patch: Patch) -> None:
    """A resumed request forgets when its caller gives up."""
    next_attempt = RequestLedger.next_attempt

    def forget(self: RequestLedger, *args: Any) -> Any:
        attempt = next_attempt(self, *args)
        return attempt if attempt is None or attempt.number == 1 else replace(attempt, time_left_s=None)

    patch.setattr(RequestLedger, "next_attempt", forget)


@_planted(Fault.MESSAGE_REPEATED, Fault.MESSAGE_REORDERED, Fault.MESSAGE_LOST)
def _replicas_append_without_a_look_at_positions(patch: Patch) -> None:
    """A replica takes tokens as they come: lost, repeated, out of order."""
    receive = RequestLedger.receive

    def append(self: RequestLedger, stream: int, handle: int, _: int, token_ids: Any) -> Any:
        live = self._requests.get(handle)
        return receive(self, stream, handle, 0 if live is None else len(live.output), token_ids)

    patch.setattr(RequestLedger, "receive", append)


@_planted(Fault.STREAM_BREAK, Fault.MESSAGE_LATE)
def _replicas_listen_to_old_streams(patch: Patch) -> None:
    """A replica takes an end from a stream that it has given up."""
    end = RequestLedger.end

    def end_anyway(self: RequestLedger, stream: int, handle: int) -> bool:
        live = self._requests.get(handle)
        return end(self, stream if live is None or live.stream is None else live.stream, handle)

    patch.setattr(RequestLedger, "end", end_anyway)
