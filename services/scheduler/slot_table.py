"""What every step touches of a running sequence, as numpy columns indexed by slot.

A step of hundreds of sequences is then a few vector operations; Python visits only the rows where something
happens. CONTROL_PLANE has the measurements: visiting every sequence costs the peers 0.6 to 13 ms per step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.sequence import Sequence
from shared.limits import TOKEN_DTYPE

IntColumn = npt.NDArray[np.int32]

# Stored tokens grow by runs, so that block 1 costs no more Python per step than block 16.
MIN_RUN_TOKENS = 16

_NO_TOKEN = -1


class SlotTable:
    """Slots and their columns.

    Invariant: a slot is free or belongs to one sequence; `live` is true while that sequence may get tokens. The
    sequence's tokens are the stored ones, followed by those of its run, followed by `num_in_flight` placeholders.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.run_tokens = max(block_size, MIN_RUN_TOKENS)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.live = np.zeros(num_slots, bool)
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_prompt_tokens = np.zeros(num_slots, np.int32)
        self.max_num_tokens = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.client = np.zeros(num_slots, np.int32)
        self.handle = np.zeros(num_slots, np.uint32)
        # Whether tokens of the prompt are still to be sent.
        self.is_prefilling = np.zeros(num_slots, bool)
        # Placeholders: tokens that steps in flight will bring.
        self.num_in_flight = np.zeros(num_slots, np.int32)
        self.last_step_id = np.zeros(num_slots, np.int64)
        # Tokens that are not stored yet; the token at position p stands in column p % width. A row that sits steps
        # out while its run is full still gets the tokens of its steps in flight: hence twice a run.
        self._run = np.zeros((num_slots, 2 * self.run_tokens), np.int32)
        # The number of tokens at which a row's run is full.
        self._run_end = np.zeros(num_slots, np.int32)
        # Tokens after which a row may have to stop, filled up with -1.
        self._watched = np.full((num_slots, 4), _NO_TOKEN, np.int32)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, seq: Sequence, watched_tokens: list[int]) -> int:
        """Put an admitted sequence, all tokens stored, into a free slot.

        Args:
            seq: Has its blocks.
            watched_tokens: Tokens that `find_stops` is to report.
        """
        slot = self._free.pop()
        self.sequences[slot] = seq
        seq.slot = slot
        self.live[slot] = True
        self.num_tokens[slot] = seq.num_stored_tokens
        self.num_prompt_tokens[slot] = seq.num_prompt_tokens
        self.max_num_tokens[slot] = seq.max_num_tokens
        self.num_blocks[slot] = len(seq.block_table)
        self.client[slot] = seq.client
        self.handle[slot] = seq.handle
        self.is_prefilling[slot] = bool(seq.num_unsent_tokens)
        self.num_in_flight[slot] = 0
        self._set_run_end(seq)
        self._watch(slot, watched_tokens)
        return slot

    def release(self, seq: Sequence) -> None:
        """Make a sequence's slot free; its tokens must be flushed."""
        assert seq.slot is not None
        self.live[seq.slot] = False
        self.sequences[seq.slot] = None
        self._free.append(seq.slot)
        seq.slot = None

    def sequence_at(self, slot: int) -> Sequence:
        """The sequence in a slot that is taken."""
        seq = self.sequences[slot]
        assert seq is not None
        return seq

    def append(self, slots: IntColumn, token_ids: IntColumn) -> None:
        """Give each row one more token."""
        positions = self.num_tokens[slots]
        self._run[slots, positions % self._run.shape[1]] = token_ids
        self.num_tokens[slots] = positions + 1

    def has_full_run(self, slots: IntColumn) -> npt.NDArray[np.bool_]:
        """Which rows are to be flushed with their next step."""
        return np.greater_equal(self.num_tokens[slots], self._run_end[slots])

    def flush(self, seq: Sequence) -> None:
        """Store the tokens that are not stored yet in the sequence."""
        assert seq.slot is not None
        columns = np.arange(seq.num_stored_tokens, self.num_tokens[seq.slot]) % self._run.shape[1]
        seq.token_bytes += self._run[seq.slot, columns].astype(TOKEN_DTYPE, copy=False).tobytes()
        self._set_run_end(seq)

    def find_stops(self, slots: IntColumn, token_ids: IntColumn) -> npt.NDArray[np.intp]:
        """Row numbers that may have to stop after their newest token: a watched token, or the length."""
        watched = (self._watched[slots] == token_ids[:, None]).any(axis=1)
        return np.flatnonzero(watched | (self.num_tokens[slots] >= self.max_num_tokens[slots]))

    def _set_run_end(self, seq: Sequence) -> None:
        self._run_end[seq.slot] = (seq.num_stored_tokens // self.run_tokens + 1) * self.run_tokens

    def _watch(self, slot: int, tokens: list[int]) -> None:
        width = self._watched.shape[1]
        if len(tokens) > width:
            padding = np.full((len(self._watched), len(tokens) - width), _NO_TOKEN, np.int32)
            self._watched = np.hstack([self._watched, padding])
        self._watched[slot] = _NO_TOKEN
        self._watched[slot, : len(tokens)] = tokens
