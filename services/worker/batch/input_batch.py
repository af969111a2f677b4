"""The host's part of the batch that a worker keeps between steps; `DeviceBatch` is the device's.

Plain numpy; only drafts may come from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from services.worker.batch.decodes import Decodes, DraftRoom, Drafts, DraftSource, PlannedStep
from services.worker.batch.enter_checks import (
    BatchLimits,
    are_distinct,
    check_enters,
    check_token_ids,
    require,
)
from services.worker.batch.input_maker import InputMaker
from services.worker.batch.slot_options import SlotOptions
from services.worker.batch.slots import Slots
from services.worker.batch.state_changes import state_changes
from services.worker.batch.step_input import StepInput
from services.worker.forward.staging import HostArrays
from services.worker.ops import DrawRows
from services.worker.sampling.sampling_rows import SamplingRows
from services.worker.sampling.sampling_state import GrammarMatcher
from shared.step.columns import Int32Column
from shared.step.step import SAMPLED_DTYPE, Chunks, Step, StepKind

_NO_SLOTS: Int32Column = np.empty(0, dtype=np.int32)


class InputBatch:
    """The sequences of one epoch by slot: lengths, block tables, sampling parameters. The device has their tokens.

    Everything that came over the wire is checked here, before any tensor is touched. A step that does not fit leaves
    the batch undefined, which ends its epoch.
    """

    def __init__(
        self,
        limits: BatchLimits,
        *,
        make_matcher: Callable[[str], GrammarMatcher] | None = None,
        eos_token_ids: Sequence[int] = (),
        drafter: DraftSource | None = None,
        makes_decodes: bool = True,
    ) -> None:
        """Grammars need `make_matcher` and the model's `eos_token_ids`, drafts `drafter`.

        If not `makes_decodes`, the tokens of plain decodes are left to the device.
        """
        self.limits = limits
        self._options = SlotOptions(limits, make_matcher=make_matcher, eos_token_ids=eos_token_ids)
        self._drafter = drafter
        # Slots in the order in which their sequences entered.
        self._order = _NO_SLOTS
        # Those of the last plain decode, which the device keeps.
        self._decoded_slots = _NO_SLOTS
        self._sampled = np.zeros(limits.max_num_seqs, dtype=SAMPLED_DTYPE)
        self._by_slot = Slots(limits)
        self._inputs = InputMaker(
            limits, self._by_slot, self._options, is_drafted=drafter is not None, makes_decodes=makes_decodes
        )

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self._order)

    def apply(self, step: Step) -> StepInput:
        """Apply the step's changes, and say what it computes, knowing all tokens before it. Raises as `begin`."""
        return self.finish(self.begin(step))

    def begin(self, step: Step) -> PlannedStep:
        """Apply the step's changes; the tokens of the step before it may not be recorded yet.

        Raises:
            StepMismatchError: the step does not fit; the batch must not be used again.
        """
        if len(step.leave_slots):
            self._leave(step.leave_slots)
        if step.is_dummy:
            require(not len(step.chunks.slots), "a dummy step must not compute a prompt")
            return PlannedStep(step, _NO_SLOTS, self._append_blocks(step))
        decode_slots = self._decode_slots(step)
        changes = self._enter(step) if len(step.enters.slots) else {}
        changes |= self._append_blocks(step)
        is_decode = step.kind is StepKind.DECODE
        require((not len(step.chunks.slots)) is is_decode, "the step's kind does not fit its prompt chunks")
        num_tokens = len(decode_slots) + len(step.chunks.token_ids)
        room = self.limits.max_num_batched_tokens - num_tokens
        require(
            num_tokens > 0 and room >= 0,
            "the step's number of tokens is out of range",
            limit=self.limits.max_num_batched_tokens,
        )
        if not is_decode:
            self._extend(step.chunks)
        drafts = None
        if self._drafter is not None and len(decode_slots):
            lengths, most = self._by_slot.num_tokens[decode_slots], self._draft_room(decode_slots)
            drafts = self._drafter.propose(DraftRoom(decode_slots, lengths, most, room, self._by_slot.tables))
        return PlannedStep(step, decode_slots, changes, drafts)

    def finish(self, planned: PlannedStep) -> StepInput:
        """Say what the step that was just begun computes, and append a token to each of its rows.

        All tokens before it are recorded. Raises as `begin`.
        """
        step = planned.step
        if step.is_dummy:
            step_input = self._inputs.dummy(planned)
        else:
            slots, drafts = planned.decode_slots, planned.drafts
            decodes = Decodes(len(slots), None, slots, None) if drafts is None else self._drafted_decodes(slots, drafts)
            step_input = self._inputs.make(decodes, planned)
            step_input.arrays.update(state_changes(step, self.limits, slots))
        if not step_input.is_plain_decode:
            step_input.arrays.update(step_input.row_arrays())
        elif not np.array_equal(step_input.slots, self._decoded_slots):
            self._decoded_slots = step_input.slots
            step_input.arrays["decode_slots"] = step_input.slots.astype(np.int64)
        # Only the device knows them.
        self._by_slot.num_tokens[step_input.row_slots] += 1
        return step_input

    def sampling(self, step_input: StepInput) -> SamplingRows:
        """How the rows of the step that was just applied are drawn, options included."""
        slots = step_input.row_slots
        rows = self._sampled[slots]
        return SamplingRows(
            temperature=rows["temperature"].copy(),
            top_k=rows["top_k"].astype(np.int32),
            top_p=rows["top_p"].copy(),
            seed=rows["seed"].copy(),
            choice=rows["choice"].astype(np.uint32),
            position=step_input.row_positions,
            states=self._options.by_row(slots) if self._options.states else {},
        )

    def record_sampled(
        self,
        slots: Int32Column,
        token_ids: Int32Column,
        counts: Int32Column | None = None,
        draft_counts: Int32Column | None = None,
    ) -> None:
        """Name the tokens of sequences whose first one is appended, and append the others.

        Args:
            slots: [num_rows].
            token_ids: [sum of counts], row after row.
            counts: [num_rows], tokens of each row, at least 1; None means one each.
            draft_counts: [num_rows], drafts that were checked for each row; None means none.
        """
        if self._drafter is not None:
            self._drafter.record(slots, token_ids, counts, draft_counts)
        if counts is not None:
            self._by_slot.num_tokens[slots] += counts - 1
            token_ids = token_ids[np.cumsum(counts) - 1]
        self._by_slot.last_tokens[slots] = token_ids

    def _leave(self, slots: Int32Column) -> None:
        self._by_slot.check_used("leave_slots", slots)
        self._by_slot.is_used[slots] = False
        self._by_slot.tables.clear(slots)
        self._order = self._order[self._by_slot.is_used[self._order]]
        if self._drafter is not None:
            self._drafter.leave(slots)
        if self._options.states:
            self._options.leave(slots)

    def _enter(self, step: Step) -> HostArrays:
        enters, slots = step.enters, step.enters.slots
        check_enters(enters, step.chunks, self.limits, needs_all_tokens=self._drafter is not None)
        is_free = not self._by_slot.is_used[slots].any() and are_distinct(slots)
        require(is_free, "a sequence enters a slot that is in use")
        self._by_slot.is_used[slots] = True
        # Until `_extend` adds the chunks, all their tokens count as later ones.
        self._by_slot.num_tokens[slots] = enters.num_cached_tokens
        self._by_slot.num_later[slots] = (step.chunks.num_tokens + step.chunks.num_later_tokens)[-len(slots) :]
        # One token is drawn after a full context, and none after that.
        self._by_slot.max_num_tokens[slots] = np.minimum(enters.max_num_tokens, self.limits.context_length + 1)
        self._sampled[slots] = enters.sampled
        is_edited = self._options.enter(enters)
        if self._drafter is not None:
            for slot, token_ids in zip(slots.tolist(), enters.told_tokens(), strict=True):
                self._drafter.enter(slot, token_ids, int(self._by_slot.max_num_tokens[slot]))
        self._order = np.concatenate([self._order, slots.astype(np.int32)])
        options = DrawRows.option_columns(len(slots), enters.options)
        return {
            "entered_slots": slots,
            # Logits that are changed before a token is drawn cost as little as possible before that.
            "entered_temperature": np.where(is_edited, np.float32(0), enters.sampled["temperature"]),
            "entered_top_k": enters.sampled["top_k"].astype(np.int32),
            "entered_top_p": enters.sampled["top_p"],
            "entered_seed": enters.sampled["seed"].view(np.int64),
            "entered_choice": enters.sampled["choice"],
            **{f"entered_{name}": column for name, column in options.items()},
        }

    def _append_blocks(self, step: Step) -> HostArrays:
        """Append blocks to tables, which are empty for sequences that enter."""
        enters, slots, block_ids = step.enters, step.append_slots, step.append_block_ids
        require(len(slots) == len(block_ids), "append_slots and append_block_ids differ in length")
        if len(slots):
            self._by_slot.check_used("append_slots", slots, may_repeat=True)
        if not len(slots) and not len(enters.slots):
            return {}
        slots = np.concatenate([np.repeat(enters.slots, enters.num_blocks), slots])
        # A copy: what came over the wire cannot be written, which torch warns of.
        block_ids = np.concatenate([enters.block_ids, block_ids])
        columns = self._by_slot.tables.append(slots, block_ids)
        return {"table_places": slots * self._by_slot.tables.width + columns, "table_ids": block_ids}

    def _decode_slots(self, step: Step) -> Int32Column:
        """Entering sequences are not decoded: they have no sampled token to start from."""
        if step.kind is StepKind.PREFILL:
            require(step.decode_slots is None, "decode_slots in a prefill step")
            return _NO_SLOTS
        slots: Int32Column = self._order[self._by_slot.num_later[self._order] == 0]
        if step.decode_slots is not None:
            slots = step.decode_slots
            self._by_slot.check_used("decode_slots", slots)
            require(not self._by_slot.num_later[slots].any(), "a sequence is decoded before its prompt is complete")
        require(len(slots) > 0, "no sequence to decode")
        return slots

    def _extend(self, chunks: Chunks) -> None:
        slots, num_new, num_later = chunks.slots, chunks.num_tokens, chunks.num_later_tokens
        self._by_slot.check_used("chunks", slots)
        columns = (slots, num_new, num_later, self._by_slot.num_later[slots])
        for slot, num, num_left, num_before in zip(*(column.tolist() for column in columns), strict=True):
            require(0 < num <= num_before, "a chunk is empty or exceeds the rest of its prompt", slot=slot)
            require(num + num_left == num_before, "a prompt's length has changed", slot=slot)
        check_token_ids("chunks.token_ids", chunks.token_ids, self.limits)
        self._by_slot.num_tokens[slots] += num_new.astype(np.int32)
        self._by_slot.num_later[slots] = num_later
        self._options.extend(chunks)
        if self._drafter is not None:
            parts = np.split(chunks.token_ids, np.cumsum(num_new)[:-1])
            for slot, token_ids in zip(slots.tolist(), parts, strict=True):
                self._drafter.extend(slot, token_ids)

    def _drafted_decodes(self, slots: Int32Column, drafts: Drafts) -> Decodes:
        """The sequences that go on, with the drafts that they have room for."""
        num_slots, numbers, room = len(slots), None, self._draft_room(slots)
        if (drafts.counts > room).any():
            # The device has drafted before the host knew where the sequences end.
            drafts = drafts.at_most(room)
        is_full = self._by_slot.num_tokens[slots] >= self._by_slot.max_num_tokens[slots]
        if is_full.any():
            numbers = np.flatnonzero(~is_full)
            # There is no room for drafts in the others.
            slots, drafts = slots[numbers], replace(drafts, counts=drafts.counts[numbers])
        return Decodes(num_slots, numbers, slots, drafts)

    def _draft_room(self, slots: Int32Column) -> Int32Column:
        """Drafts each sequence has room for; one more token is drawn after them."""
        num_places = self._by_slot.tables.num_blocks[slots] * self.limits.block_size
        # A sequence's last possible token is drawn but never computed. This also keeps drafts within the context.
        most = np.minimum(self._by_slot.max_num_tokens[slots] - 1, num_places)
        return np.maximum(most - self._by_slot.num_tokens[slots], 0)
