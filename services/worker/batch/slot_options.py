"""Options of sequences, by slot: only few sequences have some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from services.worker.batch.enter_checks import BatchLimits, require
from services.worker.batch.step_input import PooledChunk, ScoredChunk
from services.worker.sampling.sampling_state import GrammarMatcher, SamplingState
from shared.step.columns import BoolColumn, Int32Column
from shared.step.step import NO_INTS, Chunks, Enters


class SlotOptions:
    """The options of the sequences of one epoch, with the tokens that they depend on."""

    def __init__(
        self,
        limits: BatchLimits,
        *,
        make_matcher: Callable[[str], GrammarMatcher] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Grammars need `make_matcher` and the model's `eos_token_ids`."""
        self._limits = limits
        self._make_matcher = make_matcher
        self._eos_token_ids = tuple(eos_token_ids)
        self.states: dict[int, SamplingState] = {}
        """The states by slot, for sequences that have options."""

    def enter(self, enters: Enters) -> BoolColumn:
        """Keep the options of sequences that have some; [num_enters], whether they change logits.

        Raises:
            StepMismatchError: they have a grammar, and this worker knows none.
        """
        is_edited = np.zeros(len(enters.slots), np.bool_)
        told_tokens = enters.told_tokens() if enters.options else ()
        for number, options in enters.options.items():
            slot = int(enters.slots[number])
            is_known = not options.grammar or self._make_matcher is not None
            require(is_known, "grammars are not supported here", slot=slot)
            state = self.states[slot] = SamplingState(
                options,
                stop_token_ids=enters.stop_token_ids.get(number, NO_INTS),
                num_prompt_tokens=int(enters.num_prompt_tokens[number]),
                logits_width=self._limits.logits_width,
                matcher=self._make_matcher(options.grammar) if options.grammar and self._make_matcher else None,
                eos_token_ids=self._eos_token_ids,
            )
            state.extend(told_tokens[number])
            is_edited[number] = state.changes_logits
        return is_edited

    def extend(self, chunks: Chunks) -> None:
        """Add prompt tokens."""
        ends = np.cumsum(chunks.num_tokens)
        for number, state in self._numbered(chunks):
            state.extend(chunks.token_ids[ends[number] - chunks.num_tokens[number] : ends[number]])

    def leave(self, slots: Int32Column) -> None:
        """Drop the options of these slots."""
        for slot in slots.tolist():
            self.states.pop(slot, None)

    def by_row(self, slots: Int32Column) -> dict[int, SamplingState]:
        """The options of those of these `slots` [num_rows] that have some, by row."""
        slot_to_row: npt.NDArray[np.int64] = np.full(self._limits.max_num_seqs, -1)
        slot_to_row[slots] = np.arange(len(slots))
        return {int(slot_to_row[slot]): state for slot, state in self.states.items() if slot_to_row[slot] >= 0}

    def scored_chunks(self, chunks: Chunks, starts: Int32Column, num_tokens: Int32Column) -> Iterator[ScoredChunk]:
        """The chunks whose prompt tokens have log-probabilities.

        Args:
            chunks: A step's chunks.
            starts: [at least num_chunks], the step's token that each begins with.
            num_tokens: [num_slots], with those of the chunks.
        """
        for number, state in self._numbered(chunks):
            slot, num_new = int(chunks.slots[number]), int(chunks.num_tokens[number])
            position, num_top = int(num_tokens[slot]) - num_new, state.options.num_prompt_logprobs
            num_scored = min(num_new, state.num_prompt_tokens - position)
            if num_top is not None and num_scored > 0:
                start = int(starts[number])
                yield ScoredChunk(slot, start, num_scored, position, state.num_prompt_tokens, num_top)

    def pooled_chunks(self, chunks: Chunks, starts: Int32Column, num_tokens: Int32Column) -> Iterator[PooledChunk]:
        """The chunks of prompts that become vectors; as `scored_chunks`."""
        for number, state in self._numbered(chunks):
            if state.options.pooling is not None:
                slot, num_new = int(chunks.slots[number]), int(chunks.num_tokens[number])
                position, has_later = int(num_tokens[slot]) - num_new, bool(chunks.num_later_tokens[number])
                yield PooledChunk(slot, int(starts[number]), num_new, position, state.options.pooling, has_later)

    def _numbered(self, chunks: Chunks) -> Iterator[tuple[int, SamplingState]]:
        """The chunks of sequences with options, by number."""
        if self.states:
            for number, slot in enumerate(chunks.slots.tolist()):
                if slot in self.states:
                    yield number, self.states[slot]
