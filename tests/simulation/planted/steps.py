"""Bugs in steps and blocks that the simulation must detect.

Each removes or breaks one thing in the real classes. If one survives its seeds, either a fault schedule is missing or
the removed code is not needed.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.cell.engine import Engine
from services.scheduler.core.batch.sequence import TOKEN_BYTES, Sequence, SequenceStatus
from services.scheduler.core.batch.slot_table import RUN_TOKENS, SlotTable
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.cache.cached_prefix import CachedPrefix
from services.scheduler.core.planning.preemption import Preemption
from services.scheduler.core.planning.prefill import Prefill, PrefillPlanner
from services.scheduler.core.queue.tenant_queue import TenantQueue
from services.scheduler.core.results.endings import Endings
from services.scheduler.core.results.postprocess import Postprocessor
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step_deadline import StepDeadline
from services.worker.server.claim import ClaimLedger
from shared.errors import ServiceError
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

CELL_BUGS: list[PlantedBug] = []
_planted = planter(CELL_BUGS)


# Results and epochs.


@_planted(Fault.RESULT_REPEATED)
def _repeated_results_count(patch: Patch) -> None:
    """A repeated result is taken for the next step's."""
    validate_result = Scheduler.validate_result

    def validate(self: Scheduler, result: Any, logits_width: int) -> str | None:
        record = self.oldest_in_flight
        renumbered = result if record is None else replace(result, step_id=record.step_id)
        return validate_result(self, renumbered, logits_width)

    patch.setattr(Scheduler, "last_returned_step_id", 0)
    patch.setattr(Scheduler, "validate_result", validate)


@_planted(Fault.RESULT_LATE, Fault.LINK_BREAK, Fault.WORKER_CRASH)
def _results_of_old_epochs_count(patch: Patch) -> None:
    """A result of an epoch that has ended is taken for one of the current epoch."""
    on_step_returned = Engine._on_step_returned

    def take(self: Engine, rank: int, result: Any, now: float) -> Any:
        epoch = self._cell.domain_by_rank[rank].epoch
        return on_step_returned(self, rank, replace(result, epoch=epoch), now)

    patch.setattr(Engine, "_on_step_returned", take)


@_planted(Fault.RESULT_NONSENSE, Fault.RESULT_REORDERED, seed=5, raises=ValueError)
def _nonsense_counts(patch: Patch) -> None:
    """Results are not validated: invalid tokens, too many tokens, or those of another step are accepted."""
    patch.setattr(Scheduler, "validate_result", lambda *_: None)


@_planted(Fault.WORKER_HANG, Fault.RESULT_LOST, seed=12)
def _no_step_deadline(patch: Patch) -> None:
    """The engine waits forever for a worker that no longer answers."""
    patch.setattr(StepDeadline, "time", None)


@_planted(Fault.STEP_LATE, Fault.LINK_BREAK, Fault.RESULT_NONSENSE, seed=14)
def _steps_are_not_fenced(patch: Patch) -> None:
    """A worker runs steps of epochs that have ended."""
    admit = ClaimLedger.admit

    def admit_anyway(self: ClaimLedger, stream: int, *args: Any) -> None:
        with contextlib.suppress(ServiceError):
            admit(self, stream, *args)

    patch.setattr(ClaimLedger, "admit", admit_anyway)


@_planted(Fault.LINK_BREAK, Fault.WORKER_CRASH)
def _cache_survives_the_worker(patch: Patch) -> None:
    """The prefix cache is kept although the next worker starts with empty KV cells."""
    void = RunningBatch.void
    kept: list[BlockManager] = []

    def free_all(self: RunningBatch) -> list[Sequence]:
        self.blocks.free([*self.sequences(), *self.retiring()])
        return void(self)

    def make(num_blocks: int, block_size: int, **settings: Any) -> BlockManager:
        blocks = BlockManager(num_blocks, block_size, **settings)
        if not num_blocks:
            return blocks
        kept.append(blocks)
        return kept[0]

    patch.setattr(RunningBatch, "void", free_all)
    patch.setattr("services.scheduler.core.scheduler.BlockManager", make)


@_planted(Fault.LINK_BREAK)
def _placeholders_stay_when_an_epoch_ends(patch: Patch) -> None:
    """A requeued sequence keeps the placeholders of tokens that its void steps would have returned."""
    void = RunningBatch.void

    def keep(self: RunningBatch) -> list[Sequence]:
        self.slots.num_tokens[:] = self.slots.num_planned
        return void(self)

    patch.setattr(RunningBatch, "void", keep)


@_planted(Fault.LINK_BREAK)
def _tokens_are_lost_when_an_epoch_ends(patch: Patch) -> None:
    """A requeued sequence loses tokens that its client has but that were not stored yet."""
    void = RunningBatch.void

    def forget(self: RunningBatch) -> list[Sequence]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SlotTable, "flush", lambda *_: None)
            return void(self)

    patch.setattr(RunningBatch, "void", forget)


@_planted(Fault.LINK_BREAK)
def _parked_sequences_are_lost_when_an_epoch_ends(patch: Patch) -> None:
    """Only running sequences are requeued, not parked ones whose last rows are in flight."""
    void = RunningBatch.void

    def forget(self: RunningBatch) -> list[Sequence]:
        running = self.sequences()
        return [seq for seq in void(self) if seq in running]

    patch.setattr(RunningBatch, "void", forget)


# Blocks and the prefix cache.


@_planted(Fault.CANCEL, seed=5)
def _blocks_of_cancelled_requests_leak(patch: Patch) -> None:
    """A request cancelled with a step in flight never frees its blocks."""
    free = BlockManager.free

    def leak(self: BlockManager, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if seq.status is SequenceStatus.EXIT_ENGINE:
                seq.block_table = array("i")
        free(self, [seq for seq in sequences if seq.block_table])

    patch.setattr(BlockManager, "free", leak)


@_planted()
def _retiring_sequences_give_back_at_once(patch: Patch) -> None:
    """Slots and blocks are reused while steps in flight still refer to them."""
    patch.setattr(RunningBatch, "_last_record_of", lambda *_: None)


@_planted(Fault.CANCEL, Fault.DEADLINE, Fault.ABORT_CALL, seed=24)
def _blocks_are_published_at_admission(patch: Patch) -> None:
    """The blocks of a prompt's later chunks are published before a step that computes them is sent."""
    try_allocate = BlockManager.try_allocate

    def publish(self: BlockManager, seq: Sequence, prefix: CachedPrefix) -> bool:
        is_allocated = try_allocate(self, seq, prefix)
        if is_allocated:
            self.publish(seq, seq.num_stored_tokens)
        return is_allocated

    patch.setattr(BlockManager, "try_allocate", publish)


@_planted()
def _a_whole_prompt_may_be_cached(patch: Patch) -> None:
    """A fully cached prompt leaves no token to compute, so there are no logits to sample from."""
    patch.setattr(
        "services.scheduler.core.block_manager.BlockManager.find_prefix",
        _find_prefix_that_leaves_nothing(BlockManager),
    )


def _find_prefix_that_leaves_nothing(manager: type[BlockManager]) -> Callable[[BlockManager, Sequence], CachedPrefix]:
    find_prefix = manager.find_prefix

    def find(self: BlockManager, seq: Sequence) -> CachedPrefix:
        # With one more token, the last block of the prompt is no longer kept out of the match.
        seq.token_bytes += bytes(TOKEN_BYTES)
        prefix = find_prefix(self, seq)
        del seq.token_bytes[-TOKEN_BYTES:]
        return prefix

    return find


@_planted()
def _one_cached_block_too_many(patch: Patch) -> None:
    """A prefix hit is one block longer than what is shared, and that block is never computed."""
    find_prefix = BlockManager.find_prefix

    def find(self: BlockManager, seq: Sequence) -> CachedPrefix:
        prefix = find_prefix(self, seq)
        num_tokens = prefix.num_tokens + self.block_size
        return replace(prefix, num_tokens=num_tokens) if num_tokens < seq.num_stored_tokens else prefix

    patch.setattr(BlockManager, "find_prefix", find)


@_planted(seed=8)
def _prefixes_are_shared_where_that_is_off(patch: Patch) -> None:
    """Sequences share prefixes although prefix caching is off."""
    make = BlockManager.__init__

    def make_sharing(self: BlockManager, num_blocks: int, block_size: int, **settings: Any) -> None:
        make(self, num_blocks, block_size, **{**settings, "enable_prefix_caching": True})

    patch.setattr(BlockManager, "__init__", make_sharing)


@_planted()
def _a_step_shares_what_it_computes(patch: Patch) -> None:
    """Sequences share prefixes with others that enter in the same step, although in-step sharing is off."""
    patch.setattr(Prefill, "computes_any", lambda *_: False)


@_planted()
def _salts_are_ignored(patch: Patch) -> None:
    """Requests with different cache salts share prefixes."""
    find_prefix = BlockManager.find_prefix

    def find(self: BlockManager, seq: Sequence) -> CachedPrefix:
        seq.cache_salt = b""
        return find_prefix(self, seq)

    patch.setattr(BlockManager, "find_prefix", find)


@_planted(Fault.NOT_FINITE, seed=10)
def _bad_kv_stays_cached(patch: Patch) -> None:
    """KV blocks of a request whose logits were not finite stay in the prefix cache."""
    patch.setattr(BlockManager, "hide", lambda *_: None)


@_planted(Fault.NOT_FINITE)
def _rows_that_are_not_finite_count(patch: Patch) -> None:
    """The meaningless token of a row that is not finite goes to its client."""
    patch.setattr(Postprocessor, "_fail_not_finite", lambda *_: None)


@_planted(Fault.LONG_ANSWER, seed=5)
def _the_ring_wraps_wrongly(patch: Patch) -> None:
    """Tokens stored from both ends of a slot's token ring are in the wrong order."""
    flush = SlotTable.flush

    def flush_swapped(self: SlotTable, seq: Sequence) -> None:
        start, ring = seq.num_stored_tokens, 2 * RUN_TOKENS
        flush(self, seq)
        to_the_end = (ring - start % ring) * TOKEN_BYTES
        news = seq.token_bytes[start * TOKEN_BYTES :]
        seq.token_bytes[start * TOKEN_BYTES :] = news[to_the_end:] + news[:to_the_end]

    patch.setattr(SlotTable, "flush", flush_swapped)


# Overlap, chunks and preemption.


@_planted()
def _wasted_rows_are_delivered(patch: Patch) -> None:
    """A request that has ended receives the token of a row that was in flight."""
    leave = Endings._leave

    def stay(self: Endings, seq: Sequence, *args: Any) -> None:
        leave(self, seq, *args)
        if seq.slot is not None:
            self._slots.live[seq.slot] = True

    patch.setattr(Endings, "_leave", stay)


@_planted()
def _rows_behind_the_last_token(patch: Patch) -> None:
    """A request gets one row after the one that returns its last token, which can only be wasted."""
    commit = RunningBatch.commit

    def commit_more(self: RunningBatch, *args: Any) -> int:
        self.slots.max_num_tokens += 1
        step_id = commit(self, *args)
        self.slots.max_num_tokens -= 1
        return step_id

    patch.setattr(RunningBatch, "commit", commit_more)


@_planted()
def _parked_sequences_lose_tokens(patch: Patch) -> None:
    """A preempted sequence resumes without the tokens that its steps in flight returned."""
    take_back = Preemption.take_back

    def forget(self: Preemption, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RunningBatch, "store", lambda *_: None)
            take_back(self, *args)

    patch.setattr(Preemption, "take_back", forget)


@_planted(Fault.CANCEL, Fault.ABORT_CALL, Fault.DEADLINE, Fault.TEXT_STOP, seed=6)
def _a_parked_row_outlives_its_abort(patch: Patch) -> None:
    """A preempted sequence that ends with steps in flight counts as parked forever, which blocks admission."""
    patch.setattr(Preemption, "drop_parked", lambda *_: None)


@_planted(seed=6)
def _preempted_sequences_go_to_the_back(patch: Patch) -> None:
    """A preempted sequence is queued as if it had just arrived."""
    preempt = Preemption.preempt

    def preempt_late(self: Preemption, seq: Sequence, now: float) -> None:
        seq.arrived_at = now
        preempt(self, seq, now)

    patch.setattr(Preemption, "preempt", preempt_late)


@_planted(seed=1)
def _chunks_begin_one_token_late(patch: Patch) -> None:
    """A prompt's later chunks skip their first token and repeat their last one."""
    take_tokens = PrefillPlanner._take_tokens

    def skip(self: PrefillPlanner, seq: Sequence, num_tokens: int, prefill: Prefill) -> bytes:
        is_first = seq.slot is None
        tokens = take_tokens(self, seq, num_tokens, prefill)
        return tokens if is_first else tokens[TOKEN_BYTES:] + tokens[-TOKEN_BYTES:]

    patch.setattr(PrefillPlanner, "_take_tokens", skip)


@_planted(seed=1)
def _steps_exceed_their_budget(patch: Patch) -> None:
    """Prompts get more tokens in a step than its budget allows."""
    plan = PrefillPlanner.plan
    patch.setattr(
        PrefillPlanner, "plan", lambda self, budget, now, *, may_admit: plan(self, 2 * budget, now, may_admit=may_admit)
    )


@_planted(Fault.WORKER_SLOW, seed=6)
def _no_request_ages(patch: Patch) -> None:
    """A request that has waited for long never overtakes more urgent ones."""
    patch.setattr(TenantQueue, "first", lambda self, now, cached: self._order.first(now, cached))
