"""The per-step state of running sequences, as numpy columns indexed by slot.

A step is then a few vector operations; visiting every sequence in Python costs comparable schedulers 0.6 to 13 ms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.sequence import TOKEN_BYTES, Sequence
from shared.ids import Slot
from shared.request.limits import TOKEN_DTYPE
from shared.step.columns import Int32Column

# Slots are used as indexes all the time; numpy would convert indexes of any other type on every use.
Slots = npt.NDArray[np.intp]

# Tokens are stored in runs of this many, so that a row is visited for it only once per 256 steps.
RUN_TOKENS = 256

# Full runs are looked for once per 4 decode steps, and at most about a quarter of the rows is stored each time, since
# many fill up together. A row may therefore receive tokens of 16 more steps, and of 8 in flight, before its turn: at 9
# tokens each with drafts, these still fit in the second half of the ring.
_STEPS_PER_FLUSH = 4
_FLUSHED_PART = 4
_RUN_COLUMNS = 2 * RUN_TOKENS
_COLUMN_MASK = _RUN_COLUMNS - 1

# Alternating steps, such as prefills and decodes, use one array for each step in flight and one more.
_NUM_GATHERED = 4

_NO_TOKEN = -1


@dataclass(slots=True)
class RowConstants:
    """What does not change while a sequence holds its slot: [num_rows] each, read-only."""

    slots: Slots
    clients: Int32Column
    handles: np.ndarray[tuple[int], np.dtype[np.uint32]]
    only_client: int | None
    """None when there are several clients, or no rows."""
    num_prompt_tokens: Int32Column
    max_num_tokens: Int32Column
    watched: Int32Column
    """[most watched tokens of a row, num_rows], padded with -1."""
    runs: Slots
    """The start of each ring in `SlotTable._run`."""


class SlotTable:
    """Slots and their columns.

    New tokens go to the slot's ring, position p to column p % 512, and are stored in the sequence about 256 at a time:

        column      0       17          100     140         470     511
        slot 7      512 ... 529                             470 ... 511      470 tokens stored, 530 in all
        slot 8                                                               free
        slot 9                          100 ... 140                          100 tokens stored, 141 in all

    Invariant: a slot is free or belongs to one sequence; `live` is true while that sequence may get tokens. Its tokens
    are the stored ones followed by the ring's, `num_tokens` together. `num_planned` adds one placeholder for each of
    its rows in flight. With drafts it is the least number of tokens that the sequence will have, and `max_num_planned`
    the most.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int = 0) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.live = np.zeros(num_slots, bool)
        # Slots that are taken but not live.
        self.num_ended = 0
        self.num_tokens = np.zeros(num_slots, np.int32)
        # Values fixed while a sequence holds its slot are stored together, so that one `take` gathers them.
        self._constants = np.zeros((4, num_slots), np.int32)
        self.client, handle, self.num_prompt_tokens, self.max_num_tokens = self._constants
        self.handle = handle.view(np.uint32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.priority = np.zeros(num_slots, np.int32)
        # The numbers of the tenants' accounts.
        self.tenant = np.zeros(num_slots, np.intp)
        # Whether part of the prompt is still to be sent.
        self.is_prefilling = np.zeros(num_slots, bool)
        self.num_planned = np.zeros(num_slots, np.int32)
        # Whether it is in the batch order.
        self.runs = np.zeros(num_slots, bool)
        # The rings, one after the other: tokens not stored yet, position p in column p % _RUN_COLUMNS.
        self._run = np.zeros(num_slots * _RUN_COLUMNS, TOKEN_DTYPE)
        self._run_bytes = self._run.data.cast("B")
        self._num_steps_to_flush = _STEPS_PER_FLUSH
        # The number of tokens at which a row's run is full.
        self._run_end = np.zeros(num_slots, np.int32)
        # Tokens after which a row may have to stop, padded with -1: [most watched tokens of a row, num_slots].
        self._watched = np.full((1, num_slots), _NO_TOKEN, np.int32)
        self._free = [Slot(number) for number in range(num_slots - 1, -1, -1)]
        self._gathered: deque[RowConstants] = deque(maxlen=_NUM_GATHERED)

    @property
    def num_free_slots(self) -> int:
        """Slots that no sequence holds."""
        return len(self._free)

    def take(self, seq: Sequence, watched_tokens: list[int]) -> Slot:
        """Give a free slot to a sequence that has its blocks and all tokens stored.

        `find_watched` will report `watched_tokens`.
        """
        slot = self._free.pop()
        self.sequences[slot] = seq
        seq.slot = slot
        self.live[slot] = self.runs[slot] = True
        self.num_tokens[slot] = self.num_planned[slot] = seq.num_stored_tokens
        self.num_prompt_tokens[slot] = seq.num_prompt_tokens
        self.max_num_tokens[slot] = seq.max_num_tokens
        self.num_blocks[slot] = len(seq.block_table)
        self.client[slot] = seq.client
        self.handle[slot] = seq.handle
        self.priority[slot] = seq.priority
        self.tenant[slot] = seq.tenant_number
        self.is_prefilling[slot] = bool(seq.num_unsent_tokens)
        self._run_end[slot] = (seq.num_stored_tokens // RUN_TOKENS + 1) * RUN_TOKENS
        self._watch(slot, watched_tokens)
        return slot

    def end(self, slot: Slot) -> None:
        """Give the sequence no more tokens from steps in flight."""
        self.live[slot] = False
        self.num_ended += 1

    def release(self, seq: Sequence) -> None:
        """Free a sequence's slot; its tokens must be flushed."""
        assert seq.slot is not None
        if not self.live[seq.slot]:
            self.num_ended -= 1
        self.live[seq.slot] = False
        self.sequences[seq.slot] = None
        self._free.append(seq.slot)
        seq.slot = None

    def sequence_at(self, slot: Slot) -> Sequence:
        """The sequence in a taken slot."""
        seq = self.sequences[slot]
        assert seq is not None
        return seq

    def max_num_planned(self, slots: Slots) -> Int32Column:
        """The most tokens these sequences may have after their steps in flight: [num_rows]."""
        num_planned = self.num_planned[slots]
        num_placeholders = num_planned - self.num_tokens[slots]
        most: Int32Column = np.minimum(
            num_planned + self.num_draft_tokens * num_placeholders, self.max_num_tokens[slots]
        )
        return most

    def append(self, slots: Slots, positions: Int32Column, token_ids: Int32Column) -> None:
        """Give each row one more token; `positions` are the rows' numbers of tokens."""
        # One flat index costs half as much as two.
        self._run[self.constants(slots).runs + (positions & _COLUMN_MASK)] = token_ids
        self.num_tokens[slots] = positions + 1

    def append_runs(
        self, slots: Slots, counts: Int32Column, positions: npt.NDArray[np.integer], token_ids: Int32Column
    ) -> None:
        """Give each row `counts` more tokens; those beyond its placeholder are added to `num_planned`.

        Args:
            slots: [num_rows], each at most once.
            counts: [num_rows], 0 to 1 + `num_draft_tokens`.
            positions: [num_tokens], in their sequences.
            token_ids: [num_tokens], row after row.
        """
        self._run[np.repeat(slots * _RUN_COLUMNS, counts) + (positions & _COLUMN_MASK)] = token_ids
        self.num_tokens[slots] += counts
        self.num_planned[slots] += counts - 1

    def flush_full_runs(self, slots: Slots) -> None:
        """Every few calls, store the tokens of full runs. Call it with each decode step."""
        self._num_steps_to_flush -= 1
        if self._num_steps_to_flush:
            return
        self._num_steps_to_flush = _STEPS_PER_FLUSH
        due = slots[self.num_tokens[slots] >= self._run_end[slots]]
        for slot in due[: len(slots) // _FLUSHED_PART + 1].tolist():
            self.flush(self.sequence_at(slot))

    def flush(self, seq: Sequence) -> None:
        """Store the ring's tokens in the sequence."""
        slot = seq.slot
        assert slot is not None
        start, end = seq.num_stored_tokens, int(self.num_tokens[slot])
        if start == end:
            return
        row = slot * _RUN_COLUMNS
        first, last = row + start % _RUN_COLUMNS, row + end % _RUN_COLUMNS
        if first < last:
            seq.token_bytes += self._run_bytes[first * TOKEN_BYTES : last * TOKEN_BYTES]
        else:
            seq.token_bytes += self._run_bytes[first * TOKEN_BYTES : (row + _RUN_COLUMNS) * TOKEN_BYTES]
            seq.token_bytes += self._run_bytes[row * TOKEN_BYTES : last * TOKEN_BYTES]
        self._run_end[slot] = (end // RUN_TOKENS + 1) * RUN_TOKENS

    def constants(self, slots: Slots) -> RowConstants:
        """The constants of rows, cached by the identity of `slots`."""
        for constants in self._gathered:
            if constants.slots is slots:
                return constants
        constants = self._gather_constants(slots)
        self._gathered.appendleft(constants)
        return constants

    def find_watched(
        self, slots: Slots, token_ids: Int32Column, is_last: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.intp]:
        """The indexes of the tokens with which a sequence may stop.

        `slots` [num_tokens] has each token's slot; `is_last` [num_tokens] marks further tokens to report.
        """
        # One token per row: the same array of rows comes step after step.
        watched = self.constants(slots).watched if is_last is None else self._watched.take(slots, 1)
        is_watched: npt.NDArray[np.bool_] = watched[0] == token_ids
        for more in watched[1:]:
            is_watched |= more == token_ids
        if is_last is not None:
            is_watched |= is_last
        return is_watched.nonzero()[0]

    def _gather_constants(self, slots: Slots) -> RowConstants:
        # For several rows of columns, `take` is a few times as fast as indexing.
        clients, handles, num_prompt_tokens, max_num_tokens = self._constants.take(slots, 1)
        is_one = len(slots) > 0 and np.count_nonzero(clients != clients[0]) == 0
        return RowConstants(
            slots,
            clients,
            handles.view(np.uint32),
            int(clients[0]) if is_one else None,
            num_prompt_tokens,
            max_num_tokens,
            self._watched.take(slots, 1),
            slots * _RUN_COLUMNS,
        )

    def _watch(self, slot: Slot, tokens: list[int]) -> None:
        if len(tokens) > len(self._watched):
            padding = np.full((len(tokens) - len(self._watched), len(self.live)), _NO_TOKEN, np.int32)
            self._watched = np.vstack([self._watched, padding])
        self._watched[:, slot] = _NO_TOKEN
        if tokens:
            self._watched[: len(tokens), slot] = tokens
