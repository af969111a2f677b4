"""Which sequences the next step computes: prefill first, on paged KV blocks, with preemption.

Sans-I/O: no clock but the `now` it is passed. The names and the order of decisions follow ATOM's scheduler and
nano-vLLM's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.admission import NewTokenRatio
from services.scheduler.assemble import assemble
from services.scheduler.batch import (
    OutputsByClient,
    RequestEnd,
    RequestStart,
    ScheduledBatch,
    StepKind,
    StepRecord,
    StepResult,
)
from services.scheduler.block_manager import BlockManager
from services.scheduler.decode import DecodePlanner, Decodes
from services.scheduler.events import WorkerFacts
from services.scheduler.policy import CacheSettings, SchedulerCounters, SchedulerPolicy
from services.scheduler.preemption import Preemption
from services.scheduler.prefill import Prefill, PrefillPlanner
from services.scheduler.result_check import find_nonsense
from services.scheduler.row_tokens import RowTokens
from services.scheduler.running_batch import RunningBatch
from services.scheduler.sequence import Finish, FinishReason, Sequence, SequenceStatus
from services.scheduler.slot_table import IntColumn, Slots
from services.scheduler.step_deadline import StepDeadline
from services.scheduler.stops import find_finish
from services.scheduler.waiting_queue import QueuePolicy, WaitingQueue
from shared.errors import InvalidRequestError, NumericError, ServiceError, Violation

_Mask = npt.NDArray[np.bool_]

# Nothing is ever added to it.
_NO_PREFILL = Prefill()
_NO_WORKER = WorkerFacts(0, "", 0, 0, (), 0)


class Scheduler:
    """The waiting and running sequences of one worker.

    Steps are sent ahead of their predecessors' results: a sequence then has a placeholder for each token that is on
    its way, and the worker feeds each step from the tokens it sampled itself.

    A worker is held for an epoch. When the epoch ends, everything but the sequences and their tokens is void.

    Invariant: a running sequence has a slot and the blocks of all tokens that were computed or are in flight, of its
    whole prompt from its first chunk on; a waiting one has neither, unless it is parked: it was preempted, and a
    step in flight still names it.
    """

    def __init__(self, policy: SchedulerPolicy, cache: CacheSettings, counters: SchedulerCounters) -> None:
        self.counters = counters
        self.waiting = WaitingQueue(
            policy.queue_policy, policy.max_age_s, policy.max_waiting_requests, policy.max_waiting_tokens
        )
        self._policy = policy
        self._cache = cache
        self._new_token_ratio = NewTokenRatio()
        self.begin_epoch(_NO_WORKER)

    def begin_epoch(self, facts: WorkerFacts) -> None:
        """Start anew with a worker's empty pool and no step sent; nothing runs."""
        self.blocks = BlockManager(
            facts.num_blocks, self._cache.block_size, enable_prefix_caching=self._cache.enable_prefix_caching
        )
        self._running = RunningBatch(self._policy.max_num_seqs, self.blocks, facts.num_draft_tokens)
        self._slots = self._running.slots
        self._preemption = Preemption(self._policy, self.waiting, self._running, self._new_token_ratio, self.counters)
        self._prefill = PrefillPlanner(
            self._policy, self.waiting, self._running, self._new_token_ratio, facts, self.counters
        )
        self._decode = DecodePlanner(self._running, self._preemption)
        self._step_deadline = StepDeadline(self._running.in_flight)
        self._eos_token_ids = frozenset(facts.eos_token_ids)
        self._last_prefill_latency = 0.0

    def end_epoch(self, now: float) -> None:
        """The worker is lost: void its steps, and queue the sequences that ran with the tokens they have."""
        for seq in self._running.void():
            self.waiting.add(seq, now)
        self.begin_epoch(_NO_WORKER)

    @property
    def num_running(self) -> int:
        """Sequences that get rows."""
        return len(self._running.order)

    @property
    def oldest_in_flight(self) -> StepRecord | None:
        """The step whose result comes next; None when none is in flight."""
        return self._running.in_flight[0] if self._running.in_flight else None

    @property
    def last_returned_step_id(self) -> int:
        """The last step of the epoch that has returned; 0 when none has."""
        return self._running.last_returned_step_id

    @property
    def step_deadline(self) -> float | None:
        """When the worker counts as hung, unless a result comes; None when no step is in flight."""
        return self._step_deadline.time

    def schedule(self, now: float) -> tuple[int, ScheduledBatch] | None:
        """Plan the next step: a prefill when the gate is open and one fits, else a decode of all that run.

        With mixed steps, decodes join a prefill, and what they leave of the budget is the prefill's.

        Returns:
            The step's id and its plan; its record is in flight from then on. None when there is nothing to do, or
            as many steps are in flight as may be.
        """
        if len(self._running.in_flight) >= self._policy.max_steps_in_flight:
            return None
        self._make_way(now)
        if self._policy.enable_mixed_steps:
            decodes = self._decode.plan(now)
            prefill = self._plan_prefill(self._policy.max_num_batched_tokens - len(decodes.rows), now)
        else:
            prefill = self._plan_prefill(self._policy.max_num_batched_tokens, now)
            decodes = self._decode.plan(now) if prefill.is_empty else Decodes()
        if not decodes.rows.size and prefill.is_empty:
            return None
        batch = assemble(self._running.take_leave_slots(), decodes, prefill)
        self._count(batch)
        return self._running.send(batch, now), batch

    def postprocess(self, result: StepResult, now: float) -> OutputsByClient:
        """Take in the tokens of the oldest step in flight, and end what stops with them.

        Args:
            result: That of the oldest step in flight: a token a row of the record, in its order, or several where the
                worker drafts. Rows that are not finite fail with NumericError.
            now: The time.

        Returns:
            What each client that is concerned is told.
        """
        self._step_deadline.on_result(now)
        record = self._running.pop_record()
        outputs = OutputsByClient()
        if result.prompt_logprobs:
            self._tell_prompt_logprobs(result, outputs)
        rows = self._rows(record, result)
        if self._slots.num_ended or result.not_finite_rows.size or result.failed_grammar_rows.size:
            is_usable = self._slots.live[rows.slots]
            self._fail_not_finite(record, result.not_finite_rows, is_usable, outputs, now)
            for row in np.unique(result.failed_grammar_rows).tolist():
                self._fail_row(record, row, _grammar_failure(), is_usable=is_usable, outputs=outputs, now=now)
            rows = rows.of_rows(is_usable)
        slots = rows.slots
        positions = self._slots.num_tokens[slots]
        constants = self._slots.constants(slots)
        first_indexes = positions - constants.num_prompt_tokens
        if record.kind is not StepKind.DECODE:
            self._last_prefill_latency = now - record.sent_at
            self._start(slots[first_indexes == 0], outputs, now)
        if result.num_draft_tokens:
            self.counters.num_draft_tokens += result.num_draft_tokens
            self.counters.num_accepted_tokens += result.num_accepted_tokens
        if rows.counts is None:
            self._take_tokens(rows, positions, outputs, now)
        else:
            rows = self._take_runs(rows, positions, outputs, now)
        outputs.add_rows(constants, first_indexes, rows)
        for seq in record.retiring:
            # It got no row after this step's because this one brings its last token.
            if seq.status is SequenceStatus.RUNNING:
                self._end_if_stopped(seq, outputs, now)
        self._preemption.take_back(record, now)
        return outputs

    def find_nonsense(self, result: StepResult, logits_width: int) -> str | None:
        """Why a result cannot be an answer to the oldest step in flight; None when it can."""
        record = self.oldest_in_flight
        if record is None or result.step_id != record.step_id:
            return f"result of step {result.step_id}, which is not the next"
        nonsense = find_nonsense(result, record, self._slots, logits_width)
        if nonsense is None and (result.counts is not None or self._slots.num_draft_tokens):
            nonsense = self._rows(record, result).find_bad_counts(self._slots, result.not_finite_rows)
        return nonsense

    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended, wherever they are."""
        held = [*self._running.sequences(), *self._running.retiring()]
        return [*self.waiting, *(seq for seq in held if seq.leave_time is None)]

    def find_finish(self, seq: Sequence) -> Finish | None:
        """Why a waiting sequence, which has completion tokens already, has ended; None when it goes on."""
        return find_finish(seq, self._eos_token_ids)

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string that was found in its text; tokens behind it do not count."""
        if seq.slot is not None:
            self._running.store(seq)
        num_known = seq.num_stored_tokens - seq.num_prompt_tokens
        return self.finish(
            seq, Finish(FinishReason.STOP_STRING), now, num_completion_tokens=min(num_completion_tokens, num_known)
        )

    def finish(self, seq: Sequence, finish: Finish, now: float, num_completion_tokens: int | None = None) -> RequestEnd:
        """End a sequence whose tokens are stored, with all its completion tokens unless said."""
        if num_completion_tokens is None:
            num_completion_tokens = seq.num_stored_tokens - seq.num_prompt_tokens
        seq.finish = finish
        self._leave(seq, now, SequenceStatus.FINISHED)
        return RequestEnd(seq.handle, num_completion_tokens, finish)

    def abort(self, seq: Sequence, now: float) -> None:
        """Forget a sequence; its blocks are free once its steps in flight have returned."""
        if seq.slot is not None:
            self._running.store(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)

    def check_integrity(self) -> None:
        """Assert that slots, blocks and queues agree."""
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting), "a waiting sequence's status"
        assert all(not seq.block_table and seq.slot is None for seq in self.waiting), "a waiting sequence holds blocks"
        self.waiting.check_integrity()
        self._preemption.check_integrity()
        self._running.check_integrity()

    def _make_way(self, now: float) -> None:
        """Let lower classes give way to the next waiting sequence, where the queue goes by priority."""
        if self._policy.queue_policy is QueuePolicy.PRIORITY and self.waiting and self._may_admit(now):
            seq, num_blocks = self._prefill.next_waiting(now)
            self._preemption.make_way(seq, num_blocks, now)

    def _plan_prefill(self, budget: int, now: float) -> Prefill:
        if not self.waiting and not self._running.begun:
            return _NO_PREFILL
        return self._prefill.plan(budget, now, may_admit=self._may_admit(now))

    def _may_admit(self, now: float) -> bool:
        # A parked sequence goes to the queue when its steps return: nobody overtakes it.
        return not self._preemption.num_parked and self._gate_is_open(now)

    def _gate_is_open(self, now: float) -> bool:
        """The delay gate: with a factor, a prefill waits a while so that more prompts share it."""
        if not self._policy.delay_factor or not self.num_running or not self.waiting:
            return True
        waited = now - self.waiting.oldest_arrive_time()
        return waited > self._policy.delay_factor * self._last_prefill_latency

    def _count(self, batch: ScheduledBatch) -> None:
        match batch.kind:
            case StepKind.PREFILL:
                self.counters.num_prefill_steps += 1
            case StepKind.MIXED:
                self.counters.num_mixed_steps += 1
            case StepKind.DECODE:
                self.counters.num_decode_steps += 1
        if batch.kind is not StepKind.PREFILL:
            self._new_token_ratio.on_decode_step()

    def _rows(self, record: StepRecord, result: StepResult) -> RowTokens:
        """What a result brings to the rows of a step; where the worker drafts, there are counts."""
        counts = result.counts
        if counts is None and self._slots.num_draft_tokens:
            counts = np.ones(len(record.row_slots), np.int32)
        return RowTokens(record.row_slots, result.token_ids, counts, result.logprobs)

    def _take_tokens(self, rows: RowTokens, positions: IntColumn, outputs: OutputsByClient, now: float) -> None:
        """Take in a token a row, and end what stops with it."""
        self._slots.append(rows.slots, positions, rows.token_ids)
        for row in self._slots.find_watched(rows.slots, rows.token_ids).tolist():
            self._end_if_stopped(self._slots.sequence_at(int(rows.slots[row])), outputs, now)

    def _take_runs(self, rows: RowTokens, positions: IntColumn, outputs: OutputsByClient, now: float) -> RowTokens:
        """Take in the rows' tokens, several of each, and end what stops within them.

        Returns:
            The rows without the tokens that stand behind a stop: those count for nothing.
        """
        slots, counts = rows.slots, rows.counts
        assert counts is not None
        row_numbers, token_positions = rows.places(positions)
        token_slots = slots[row_numbers]
        self._slots.append_runs(slots, counts, token_positions, rows.token_ids)
        kept = counts.copy()
        is_last = token_positions == self._slots.max_num_tokens[token_slots] - 1
        for index in self._slots.find_watched(token_slots, rows.token_ids, is_last).tolist():
            slot = int(token_slots[index])
            num_tokens = int(token_positions[index]) + 1
            # Who has stopped before, within the same run, lives no more.
            if self._slots.live[slot] and self._ends_at(self._slots.sequence_at(slot), num_tokens, outputs, now):
                kept[row_numbers[index]] = num_tokens - positions[row_numbers[index]]
        self._running.retire_complete(slots, self._slots.num_planned[slots])
        return rows.cut(kept)

    def _start(self, slots: Slots, outputs: OutputsByClient, now: float) -> None:
        """Note that these rows have got their first token."""
        for slot in slots.tolist():
            seq = self._slots.sequence_at(slot)
            seq.first_token_time = now
            assert seq.num_first_cached_tokens is not None
            outputs.add_start(seq.client, RequestStart(seq.handle, seq.num_first_cached_tokens))

    def _tell_prompt_logprobs(self, result: StepResult, outputs: OutputsByClient) -> None:
        """Tell what is new of prompts: one that is computed again repeats nothing."""
        for slot, logprobs in result.prompt_logprobs:
            seq = self._slots.sequence_at(slot)
            news = logprobs.behind(seq.last_prompt_logprob)
            if news is not None and self._slots.live[slot]:
                seq.last_prompt_logprob = int(news.indexes[-1])
                outputs.add_prompt_logprobs(seq.client, seq.handle, news)

    def _end_if_stopped(self, seq: Sequence, outputs: OutputsByClient, now: float) -> None:
        """End a sequence if it stops with its newest token."""
        self._running.store(seq)
        finish = find_finish(seq, self._eos_token_ids)
        if finish is not None:
            outputs.add_end(seq.client, self.finish(seq, finish, now))

    def _ends_at(self, seq: Sequence, num_tokens: int, outputs: OutputsByClient, now: float) -> bool:
        """End a sequence if it stops with the last of its first `num_tokens`; it has none behind them then."""
        assert seq.slot is not None
        slot, num_known = seq.slot, self._slots.num_tokens[seq.slot]
        self._slots.num_tokens[slot] = num_tokens
        self._end_if_stopped(seq, outputs, now)
        if seq.finish is None:
            self._slots.num_tokens[slot] = num_known
        return seq.finish is not None

    def _fail_not_finite(
        self,
        record: StepRecord,
        rows: IntColumn,
        is_usable: _Mask,
        outputs: OutputsByClient,
        now: float,
    ) -> None:
        """End the requests of these rows, as far as they live; their KV is found by nobody, their tokens count not.

        That of a request which has ended meanwhile, by its client's wish for instance, is as bad.
        """
        for row in np.unique(rows).tolist():
            self.blocks.hide(self._slots.sequence_at(int(record.row_slots[row])))
            error = NumericError("the model's logits were not finite")
            self._fail_row(record, row, error, is_usable=is_usable, outputs=outputs, now=now)

    def _fail_row(
        self,
        record: StepRecord,
        row: int,
        error: ServiceError,
        *,
        is_usable: _Mask,
        outputs: OutputsByClient,
        now: float,
    ) -> None:
        """End the sequence of a row with an error, if it lives; the row's tokens are not usable then."""
        if not is_usable[row]:
            return
        is_usable[row] = False
        seq = self._slots.sequence_at(int(record.row_slots[row]))
        self._slots.flush(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)
        outputs.add_end(seq.client, RequestEnd(seq.handle, error=error))

    def _leave(self, seq: Sequence, now: float, status: SequenceStatus) -> None:
        """End a sequence whose tokens are stored, wherever it is."""
        self.counters.num_finished += 1
        seq.leave_time = now
        if seq.slot is None:
            self.waiting.remove(seq, now)
        elif seq.status is SequenceStatus.WAITING:
            self._preemption.forget_parked(seq)
        elif not seq.is_retiring:
            self._running.drop(seq)
        seq.status = status
        if seq.slot is not None:
            self._slots.end(seq.slot)


def _grammar_failure() -> ServiceError:
    rule = "it cannot be followed any further within the limits of this server"
    return InvalidRequestError.from_violations([Violation("structured_output", "GRAMMAR_TOO_COMPLEX", rule)])
