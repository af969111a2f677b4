"""Options of sequences, by slot: only few sequences have some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from services.worker.batch.enter_checks import BatchLimits, require
from services.worker.batch.step_input import PooledChunk, ScoredChunk
from services.worker.sampling.sampling_state import GrammarMatcher, SamplingState
from shared.step.columns import Int32Column
from shared.step.step import EnteringSequence, PrefillChunk


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

    def enter(self, enter: EnteringSequence) -> bool:
        """Keep a sequence's options, if it has some; says whether they change logits.

        Raises:
            StepMismatchError: they have a grammar, and this worker knows none.
        """
        slot, options = enter.chunk.slot, enter.params.options
        if options is None:
            return False
        require(not options.grammar or self._make_matcher is not None, "grammars are not supported here", slot=slot)
        state = self.states[slot] = SamplingState(
            options,
            stop_token_ids=np.array(enter.stop_token_ids, np.int32),
            num_prompt_tokens=enter.num_prompt_tokens,
            logits_width=self._limits.logits_width,
            matcher=self._make_matcher(options.grammar) if options.grammar and self._make_matcher else None,
            eos_token_ids=self._eos_token_ids,
        )
        state.extend(enter.cached_token_ids)
        return state.changes_logits

    def leave(self, slots: Int32Column) -> None:
        """Drop the options of these slots."""
        for slot in slots.tolist():
            self.states.pop(slot, None)

    def by_row(self, slots: Int32Column) -> dict[int, SamplingState]:
        """The options of those of these `slots` [num_rows] that have some, by row."""
        slot_to_row: npt.NDArray[np.int64] = np.full(self._limits.max_num_seqs, -1)
        slot_to_row[slots] = np.arange(len(slots))
        return {int(slot_to_row[slot]): state for slot, state in self.states.items() if slot_to_row[slot] >= 0}

    def scored_chunks(
        self, chunks: Sequence[PrefillChunk], starts: Int32Column, num_tokens: Int32Column
    ) -> Iterator[ScoredChunk]:
        """The chunks whose prompt tokens have log-probabilities.

        Args:
            chunks: A step's chunks.
            starts: [at least num_chunks], the step's token that each begins with.
            num_tokens: [num_slots], with those of the chunks.
        """
        for chunk, start in zip(chunks, starts.tolist(), strict=False):
            state = self.states.get(chunk.slot)
            if state is None or state.options.num_prompt_logprobs is None:
                continue
            position = int(num_tokens[chunk.slot]) - chunk.num_tokens
            num_scored = min(chunk.num_tokens, state.num_prompt_tokens - position)
            if num_scored > 0:
                yield ScoredChunk(
                    chunk.slot,
                    start,
                    num_scored,
                    position,
                    state.num_prompt_tokens,
                    state.options.num_prompt_logprobs,
                )

    def pooled_chunks(
        self, chunks: Sequence[PrefillChunk], starts: Int32Column, num_tokens: Int32Column
    ) -> Iterator[PooledChunk]:
        """The chunks of prompts that become vectors; as `scored_chunks`."""
        for chunk, start in zip(chunks, starts.tolist(), strict=False):
            state = self.states.get(chunk.slot)
            if state is not None and state.options.pooling is not None:
                position = int(num_tokens[chunk.slot]) - chunk.num_tokens
                has_later = chunk.num_later_tokens > 0
                yield PooledChunk(chunk.slot, start, chunk.num_tokens, position, state.options.pooling, has_later)
