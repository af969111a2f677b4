"""How the input of a step is made of the batch, when the step's changes are applied. Plain numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.batch.decodes import NO_DRAFTS, Decodes, PlannedStep
from services.worker.batch.enter_checks import BatchLimits, require
from services.worker.batch.slot_options import SlotOptions
from services.worker.batch.slots import Slots
from services.worker.batch.step_input import StepInput
from services.worker.sampling.runs import NO_RUNS, Runs
from shared.step.columns import Int32Column
from shared.step.step import StepKind

_Numbers = npt.NDArray[np.int64]


class InputMaker:
    """Reads what an `InputBatch` knows of its sequences, and changes nothing of it."""

    def __init__(
        self, limits: BatchLimits, by_slot: Slots, options: SlotOptions, *, is_drafted: bool, makes_decodes: bool
    ) -> None:
        """If not `makes_decodes`, the tokens of plain decodes are left to the device."""
        self._limits = limits
        self._by_slot = by_slot
        self._options = options
        self._is_drafted = is_drafted
        self._makes_decodes = makes_decodes

    def make(self, decodes: Decodes, planned: PlannedStep) -> StepInput:
        """The input of a step that computes `decodes` and its chunks.

        Raises:
            StepMismatchError: a sequence does not fit its blocks or the context.
        """
        slots, drafts, chunks = decodes.slots, decodes.drafts, planned.step.chunks
        lengths = self._by_slot.num_tokens
        if drafts is not None and not len(drafts.token_ids):
            drafts = None
        query_lens = np.ones(len(slots), dtype=np.int32)
        context_lens = lengths[slots]
        if drafts is not None:
            query_lens += drafts.counts
            context_lens += drafts.counts
        row_indexes: npt.NDArray[np.int64] | None = None
        if is_prefill := len(chunks.slots) > 0:
            slots = np.concatenate([slots, chunks.slots.astype(np.int32)])
            query_lens = np.concatenate([query_lens, chunks.num_tokens.astype(np.int32)])
            context_lens = np.concatenate([context_lens, lengths[chunks.slots]])
            row_indexes = np.flatnonzero(self._by_slot.num_later[slots] == 0)
        row_slots = slots if row_indexes is None else slots[row_indexes]
        num_blocks_needed = self._check_lengths(slots, context_lens)
        cu_seqlens_q = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        num_tokens, num_decodes = int(cu_seqlens_q[-1]), len(decodes.slots)
        num_done, num_prefilled = decodes.num_slots - num_decodes, len(row_slots) - num_decodes
        starts, has_options = cu_seqlens_q[num_decodes:], bool(self._options.states)
        num_blocks = int(num_blocks_needed.max(initial=0))
        is_plain_decode = 0 < num_tokens == num_decodes == len(slots)
        needs_logits = has_options and self._need_logits(row_slots)
        draft_counts, runs = None, NO_RUNS
        if drafts is not None:
            draft_counts = np.concatenate([drafts.counts, np.zeros(num_prefilled, np.int32)])
        if drafts is not None or needs_logits:
            runs = Runs.of(len(row_slots), draft_counts, NO_DRAFTS if drafts is None else drafts.token_ids)
        arrays = planned.changes
        if self._makes_decodes or not is_plain_decode:
            arrays |= self._places(slots, context_lens, query_lens)
            arrays["token_ids"] = self._token_ids(decodes.slots, int(cu_seqlens_q[num_decodes]), runs, chunks.token_ids)
            arrays["block_tables"] = self._by_slot.tables.ids[slots, :num_blocks]
            if num_decodes and not self._is_drafted:
                arrays["unknown_slots"] = decodes.slots.astype(np.int64)
        if drafts is not None and drafts.chosen is not None:
            arrays["chosen_drafts"] = drafts.chosen
        return StepInput(
            num_decodes=num_decodes,
            slots=slots,
            num_result_rows=len(row_slots) + num_done,
            row_numbers=None if decodes.numbers is None else decodes.row_numbers(len(row_slots)),
            row_slots=row_slots,
            row_indexes=row_indexes,
            row_positions=lengths[row_slots].astype(np.int64),
            context_lens=context_lens,
            query_lens=query_lens,
            cu_seqlens_q=cu_seqlens_q,
            num_tokens=num_tokens,
            is_prefill=is_prefill,
            is_plain_decode=is_plain_decode,
            num_blocks=num_blocks,
            has_options=needs_logits,
            table_width=self._by_slot.tables.width,
            arrays=arrays,
            runs=runs,
            device_drafts=None if drafts is None else drafts.device,
            draft_counts=draft_counts,
            scored_chunks=tuple(self._options.scored_chunks(chunks, starts, lengths)) if has_options else (),
            pooled_chunks=tuple(self._options.pooled_chunks(chunks, starts, lengths)) if has_options else (),
        )

    def dummy(self, planned: PlannedStep) -> StepInput:
        """The input of a step that computes nothing that counts; raises StepMismatchError if it names a sequence."""
        step, limits = planned.step, self._limits
        require(step.decode_slots is None or not len(step.decode_slots), "a dummy step must not decode a sequence")
        require(not len(step.state_saves) and not len(step.state_restores), "a dummy step must not copy a state")
        is_prefill, num_tokens = step.kind is not StepKind.DECODE, step.num_dummy_tokens
        most = min(limits.max_num_batched_tokens, limits.context_length) if is_prefill else 1
        require(1 <= num_tokens <= most, "a dummy step's number of tokens is out of range", limit=most)
        return StepInput.dummy(
            num_tokens,
            -(-num_tokens // limits.block_size),
            is_prefill=is_prefill,
            table_width=self._by_slot.tables.width,
            changes=planned.changes,
        )

    def _need_logits(self, slots: Int32Column) -> bool:
        return any(state.needs_logits for state in self._options.by_row(slots).values())

    def _places(self, slots: Int32Column, context_lens: Int32Column, query_lens: Int32Column) -> dict[str, _Numbers]:
        """The positions of a step's tokens, and their places in the cache."""
        # A sequence's tokens in this step are the last ones of its context, so both end at the same position.
        positions = np.arange(query_lens.sum(), dtype=np.int64)
        positions += np.repeat(context_lens - np.cumsum(query_lens), query_lens)
        block_size = self._limits.block_size
        block_ids = self._by_slot.tables.ids[np.repeat(slots, query_lens), positions // block_size]
        return {"positions": positions, "slot_mapping": block_ids * np.int64(block_size) + positions % block_size}

    def _token_ids(self, decode_slots: Int32Column, num_decoded: int, runs: Runs, chunked: Int32Column) -> _Numbers:
        """Tokens of decodes, `num_decoded` with their drafts, and of chunks."""
        token_ids = self._by_slot.last_tokens[decode_slots]
        if num_decoded > len(decode_slots):
            # A place wants the draft that is the next one's token; decodes are the first rows.
            last_tokens, token_ids = token_ids, np.empty(num_decoded, np.int32)
            token_ids[1:] = runs.wanted[: num_decoded - 1]
            token_ids[runs.firsts[: len(decode_slots)]] = last_tokens
        return np.concatenate([token_ids, chunked], dtype=np.int64)

    def _check_lengths(self, slots: Int32Column, context_lens: Int32Column) -> Int32Column:
        """Blocks each context needs; refuse the step if a sequence lacks them."""
        require(
            int(context_lens.max(initial=0)) <= self._limits.context_length,
            "a sequence is longer than the context",
            limit=self._limits.context_length,
        )
        num_blocks_needed: Int32Column = (context_lens + (self._limits.block_size - 1)) // self._limits.block_size
        require(
            bool((num_blocks_needed <= self._by_slot.tables.num_blocks[slots]).all()),
            "a block table is too short for its sequence",
        )
        return num_blocks_needed
