"""Turns a step's result into outputs for clients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.row_tokens import RowTokens
from services.scheduler.core.batch.sequence import Sequence, SequenceStatus
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.batch.step import StepRecord
from services.scheduler.core.planning.preemption import Preemption
from services.scheduler.core.policy import SchedulerCounters
from services.scheduler.core.queue.tenant_counters import TenantCounters
from services.scheduler.core.results.endings import Endings
from services.scheduler.core.results.outputs import OutputsByClient, RequestStart
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.step_deadline import StepDeadline
from shared.errors import InvalidRequestError, NumericError, ServiceError, Violation
from shared.ids import Slot
from shared.step.columns import Int32Column
from shared.step.step import StepKind, StepResult

_Mask = npt.NDArray[np.bool_]


class Postprocessor:
    """Takes in the results of one epoch's steps, in order.

    A result is matched to sequences by its step's record, never by which sequence holds a slot now.
    `last_prefill_latency` is the seconds from sending the last step with a prefill to its result; 0 before the first.
    """

    def __init__(
        self,
        running: RunningBatch,
        preemption: Preemption,
        step_deadline: StepDeadline,
        *,
        endings: Endings,
        tenants: TenantCounters,
        counters: SchedulerCounters,
    ) -> None:
        self._tenants = tenants
        self.last_prefill_latency = 0.0
        self._running = running
        self._slots = running.slots
        self._preemption = preemption
        self._step_deadline = step_deadline
        self._endings = endings
        self._counters = counters

    def postprocess(self, result: StepResult, now: float) -> OutputsByClient:
        """Take in the oldest step in flight, and end the sequences that stop with it.

        `result` has one token per row of the record, or several when the worker drafts. Rows whose logits are not
        finite fail with NumericError; those whose grammar failed, with InvalidRequestError after the tokens before the
        failure, unless these contain a stop.
        """
        self._step_deadline.on_result(now)
        record = self._running.pop_record()
        outputs = OutputsByClient()
        if result.prompt_logprobs or result.vectors:
            self._deliver_of_prompts(result, outputs)
        rows = RowTokens.of_result(result, record.row_slots, self._slots.num_draft_tokens)
        failed: list[Sequence] = []
        if self._slots.num_ended or result.not_finite_rows.size or result.failed_grammar_rows.size:
            is_usable = self._slots.live[rows.slots]
            self._fail_not_finite(record, result.not_finite_rows, is_usable, outputs, now)
            if result.failed_grammar_rows.size:
                rows, failed = self._cut_failed(rows, np.unique(result.failed_grammar_rows), is_usable)
            rows = rows.of_rows(is_usable)
        # After rows that are not finite have withdrawn their states.
        self._running.end_states(record, result)
        slots = rows.slots
        positions = self._slots.num_tokens[slots]
        constants = self._slots.constants(slots)
        first_indexes = positions - constants.num_prompt_tokens
        if record.kind is not StepKind.DECODE:
            self.last_prefill_latency = now - record.sent_at
            self._start(slots[first_indexes == 0], outputs, now)
        if result.num_draft_tokens:
            self._counters.num_draft_tokens += result.num_draft_tokens
            self._counters.num_accepted_tokens += result.num_accepted_tokens
        if rows.counts is None:
            self._append_tokens(rows, positions, outputs, now)
        else:
            rows = self._append_runs(rows, positions, outputs, now)
        self._counters.num_completion_tokens += len(rows.token_ids)
        if self._tenants.are_shared:
            self._tenants.charge_output(self._slots.tenant[rows.slots], rows.counts)
        outputs.add_rows(constants, first_indexes, rows)
        for seq in failed:
            # A stop in the tokens before the failure takes precedence.
            if seq.finish is None:
                self._endings.fail(seq, _grammar_failure(), outputs, now)
        for seq in record.retiring:
            # It is retiring because this step returns its last token.
            if seq.status is SequenceStatus.RUNNING:
                self._endings.end_if_stopped(seq, outputs, now)
        self._preemption.take_back(record, now)
        return outputs

    def _append_tokens(self, rows: RowTokens, positions: Int32Column, outputs: OutputsByClient, now: float) -> None:
        self._slots.append(rows.slots, positions, rows.token_ids)
        for row in self._slots.find_watched(rows.slots, rows.token_ids).tolist():
            self._endings.end_if_stopped(self._slots.sequence_at(Slot(int(rows.slots[row]))), outputs, now)

    def _append_runs(self, rows: RowTokens, positions: Int32Column, outputs: OutputsByClient, now: float) -> RowTokens:
        """Returns the rows without the tokens after a stop."""
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
            # Skip a sequence that already stopped earlier in the same run.
            if self._slots.live[slot] and self._endings.ends_at(
                self._slots.sequence_at(Slot(slot)), num_tokens, outputs, now
            ):
                kept[row_numbers[index]] = num_tokens - positions[row_numbers[index]]
        self._running.retire_complete(slots, self._slots.num_planned[slots])
        return rows.cut(kept)

    def _start(self, slots: Slots, outputs: OutputsByClient, now: float) -> None:
        for slot in slots.tolist():
            seq = self._slots.sequence_at(Slot(slot))
            assert seq.num_first_cached_tokens is not None
            prefill_s = now - seq.dequeued_at
            outputs.add_start(
                seq.client, RequestStart(seq.handle, seq.num_first_cached_tokens, seq.waited_s, prefill_s)
            )

    def _cut_failed(
        self, rows: RowTokens, failed_rows: Int32Column, is_usable: _Mask
    ) -> tuple[RowTokens, list[Sequence]]:
        """Drop the meaningless last token of rows whose grammar failed; a row without another becomes unusable.

        Returns also the sequences that fail unless their remaining tokens contain a stop.
        """
        failed = [
            self._slots.sequence_at(Slot(slot)) for slot in rows.slots[failed_rows[is_usable[failed_rows]]].tolist()
        ]
        rows = rows.without_last(failed_rows)
        assert rows.counts is not None
        is_usable &= rows.counts > 0
        return rows, failed

    def _deliver_of_prompts(self, result: StepResult, outputs: OutputsByClient) -> None:
        """Deliver what the client does not have yet of a prompt's log-probabilities, and vectors."""
        for slot, values in result.vectors:
            seq = self._slots.sequence_at(Slot(slot))
            if self._slots.live[slot]:
                outputs.add_vector(seq.client, seq.handle, values)
        for slot, logprobs in result.prompt_logprobs:
            seq = self._slots.sequence_at(Slot(slot))
            news = logprobs.after(seq.last_prompt_logprob)
            if news is not None and self._slots.live[slot]:
                seq.last_prompt_logprob = int(news.indexes[-1])
                outputs.add_prompt_logprobs(seq.client, seq.handle, news)

    def _fail_not_finite(
        self,
        record: StepRecord,
        rows: Int32Column,
        is_usable: _Mask,
        outputs: OutputsByClient,
        now: float,
    ) -> None:
        """Fail the unfinished requests of these rows, and hide the KV of all of them from the prefix cache."""
        for row in np.unique(rows).tolist():
            seq = self._slots.sequence_at(Slot(int(record.row_slots[row])))
            self._running.blocks.hide(seq)
            if is_usable[row]:
                is_usable[row] = False
                self._endings.fail(seq, NumericError("the model's logits were not finite"), outputs, now)


def _grammar_failure() -> ServiceError:
    rule = "the grammar cannot be followed any further within the limits of this server"
    return InvalidRequestError.from_violations([Violation("structured_output", "GRAMMAR_TOO_COMPLEX", rule)])
