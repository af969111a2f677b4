"""The batch that a worker holds between steps, and the inputs of each step made from it.

Plain numpy on the host: every number that came over the wire is checked here, before a tensor is touched. A step
that does not fit leaves the batch undefined; its epoch ends with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.block_tables import BlockTables
from services.worker.sampler import SamplingRows
from services.worker.step import EnteringSequence, Int32Column, PrefillChunk, Step, StepKind
from shared.errors import StepMismatchError

_NO_SLOTS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What every step has to stay below."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    context_length: int
    logits_width: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step computes, in host arrays that belong to it alone.

    Sequence i computes the tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1]). A token is sampled for those that are
    complete: the result's rows.
    """

    is_prefill: bool  # whether any tokens are a prompt's
    row_slots: Int32Column  # [num_rows]
    row_indexes: npt.NDArray[np.int64] | None  # [num_rows], which sequences they are; None: all, in order
    token_ids: npt.NDArray[np.int64]  # [num_tokens]
    positions: npt.NDArray[np.int64]  # [num_tokens], each token's place in its sequence
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens], block_id * block_size + offset
    block_tables: Int32Column  # [num_seqs, most blocks of one], 0 behind a sequence's last block
    context_lens: Int32Column  # [num_seqs], this step's tokens included
    query_lens: Int32Column  # [num_seqs], this step's tokens
    cu_seqlens_q: Int32Column  # [num_seqs + 1]
    sampling: SamplingRows  # of the rows


class InputBatch:
    """The sequences of one epoch by slot: lengths, last tokens, block tables, sampling parameters.

    Invariant: `num_tokens` of a slot counts the tokens known, the sampled ones included; after a step the KV of
    all but the last is in the cache, and of all while `num_later` more tokens of the prompt are to come.
    """

    def __init__(self, limits: BatchLimits) -> None:
        num_slots = limits.max_num_seqs
        self._limits = limits
        # Slots in the order in which their sequences entered.
        self._order = _NO_SLOTS
        self._is_used = np.zeros(num_slots, dtype=np.bool_)
        self._num_tokens = np.zeros(num_slots, dtype=np.int32)
        self._num_later = np.zeros(num_slots, dtype=np.int32)
        self._last_token = np.zeros(num_slots, dtype=np.int32)
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int32)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._tables = BlockTables(
            num_slots=num_slots,
            num_pool_blocks=limits.num_blocks,
            max_blocks_per_sequence=-(-limits.context_length // limits.block_size),
        )

    @property
    def num_seqs(self) -> int:
        """Sequences held."""
        return len(self._order)

    def apply(self, step: Step) -> StepInput:
        """Change the batch as the step says and make the inputs of what it computes.

        Raises:
            StepMismatchError: the step does not fit; the batch must not be used again.
        """
        self._leave(step.leave_slots)
        decode_slots = self._decode_slots(step)
        self._enter(step.enters)
        self._append_blocks(step.append_slots, step.append_block_ids)
        chunks = (*step.chunks, *(enter.chunk for enter in step.enters))
        _require(bool(chunks) is (step.kind is not StepKind.DECODE), "the step's kind does not fit its prompts")
        num_tokens = len(decode_slots) + sum(len(chunk.token_ids) for chunk in chunks)
        _require(
            0 < num_tokens <= self._limits.max_num_batched_tokens,
            "the number of tokens is out of range",
            limit=self._limits.max_num_batched_tokens,
        )
        for chunk in chunks:
            self._extend(chunk)
        return self._make_input(decode_slots, chunks)

    def record_sampled(self, slots: Int32Column, token_ids: Int32Column) -> None:
        """Put one sampled token behind each row's sequence: the input of its next decode step."""
        self._last_token[slots] = token_ids
        self._num_tokens[slots] += 1

    def _leave(self, slots: Int32Column) -> None:
        if not len(slots):
            return
        self._check_used("leave_slots", slots)
        self._is_used[slots] = False
        self._tables.clear(slots)
        self._order = self._order[self._is_used[self._order]]

    def _enter(self, enters: Sequence[EnteringSequence]) -> None:
        if not enters:
            return
        for enter in enters:
            self._check_enter(enter)
            slot = enter.chunk.slot
            self._is_used[slot] = True
            # Until `_extend` takes the chunk in, all its tokens are later ones.
            self._num_tokens[slot] = enter.num_cached_tokens
            self._num_later[slot] = len(enter.chunk.token_ids) + enter.chunk.num_later_tokens
            self._tables.set(slot, enter.block_ids)
            self._temperature[slot] = enter.temperature
            self._top_k[slot] = enter.top_k
            self._top_p[slot] = enter.top_p
            self._seed[slot] = enter.seed
        self._order = np.concatenate([self._order, np.array([enter.chunk.slot for enter in enters], dtype=np.int32)])

    def _append_blocks(self, slots: Int32Column, block_ids: Int32Column) -> None:
        _require(len(slots) == len(block_ids), "append_slots and append_block_ids differ in length")
        if len(slots):
            self._check_used("append_slots", slots, may_repeat=True)
            self._tables.append(slots, block_ids)

    def _decode_slots(self, step: Step) -> Int32Column:
        """The sequences that are decoded; those that enter have no sampled token yet that they could start from."""
        if step.kind is StepKind.PREFILL:
            _require(step.decode_slots is None, "decode_slots in a prefill step")
            return _NO_SLOTS
        slots: Int32Column = self._order[self._num_later[self._order] == 0]
        if step.decode_slots is not None:
            slots = step.decode_slots
            self._check_used("decode_slots", slots)
            _require(not self._num_later[slots].any(), "a sequence is decoded before its prompt is complete")
        _require(len(slots) > 0, "no sequence to decode")
        return slots

    def _extend(self, chunk: PrefillChunk) -> None:
        """Take the next tokens of a prompt in."""
        slot, num_new = chunk.slot, len(chunk.token_ids)
        self._check_used("chunks", np.array([slot]))
        _require(0 < num_new <= self._num_later[slot], "a chunk does not fit its prompt", slot=slot)
        _require(num_new + chunk.num_later_tokens == self._num_later[slot], "a prompt changed its length", slot=slot)
        _require(
            bool(0 <= chunk.token_ids.min() <= chunk.token_ids.max() < self._limits.logits_width),
            "a token id is out of range",
            slot=slot,
            limit=self._limits.logits_width,
        )
        self._num_tokens[slot] += num_new
        self._num_later[slot] = chunk.num_later_tokens

    def _make_input(self, decode_slots: Int32Column, chunks: Sequence[PrefillChunk]) -> StepInput:
        slots, token_ids = decode_slots, self._last_token[decode_slots]
        query_lens = np.ones(len(decode_slots), dtype=np.int32)
        row_indexes: npt.NDArray[np.int64] | None = None
        if chunks:
            slots = np.concatenate([slots, np.array([chunk.slot for chunk in chunks], dtype=np.int32)])
            _require(len(np.unique(slots)) == len(slots), "a slot stands in the step twice")
            token_ids = np.concatenate([token_ids, *(chunk.token_ids for chunk in chunks)])
            lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
            query_lens = np.concatenate([query_lens, lengths])
            row_indexes = np.flatnonzero(self._num_later[slots] == 0)
        row_slots = slots if row_indexes is None else slots[row_indexes]
        block_size = self._limits.block_size
        context_lens = self._num_tokens[slots]
        longest = int(context_lens.max())
        _require(
            longest <= self._limits.context_length,
            "a sequence is longer than the context",
            limit=self._limits.context_length,
        )
        num_blocks_needed = (context_lens + (block_size - 1)) // block_size
        _require(
            bool((num_blocks_needed <= self._tables.num_blocks(slots)).all()),
            "a block table is too short for its sequence",
        )
        cu_seqlens_q = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        # A row's tokens are the last of its context, so both end at the same place.
        positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(context_lens - cu_seqlens_q[1:], query_lens)
        block_ids = self._tables.ids_at(np.repeat(slots, query_lens), positions // block_size)
        return StepInput(
            is_prefill=bool(chunks),
            row_slots=row_slots,
            row_indexes=row_indexes,
            token_ids=token_ids.astype(np.int64),
            positions=positions,
            slot_mapping=block_ids * np.int64(block_size) + positions % block_size,
            block_tables=self._tables.rows(slots, int(num_blocks_needed.max())),
            context_lens=context_lens,
            query_lens=query_lens,
            cu_seqlens_q=cu_seqlens_q,
            sampling=SamplingRows(
                temperature=self._temperature[row_slots],
                top_k=self._top_k[row_slots],
                top_p=self._top_p[row_slots],
                seed=self._seed[row_slots],
                position=self._num_tokens[row_slots].astype(np.int64),
            ),
        )

    def _check_used(self, column: str, slots: Int32Column, *, may_repeat: bool = False) -> None:
        in_range = not len(slots) or 0 <= slots.min() <= slots.max() < self._limits.max_num_seqs
        _require(bool(in_range), "a slot is out of range", column=column, limit=self._limits.max_num_seqs)
        _require(bool(self._is_used[slots].all()), "a slot holds no sequence", column=column)
        _require(may_repeat or len(np.unique(slots)) == len(slots), "a slot stands there twice", column=column)

    def _check_enter(self, enter: EnteringSequence) -> None:
        limits = self._limits
        slot = enter.chunk.slot
        num_tokens = enter.num_cached_tokens + len(enter.chunk.token_ids) + enter.chunk.num_later_tokens
        _require(0 <= slot < limits.max_num_seqs, "a slot is out of range", slot=slot, limit=limits.max_num_seqs)
        _require(not self._is_used[slot], "a sequence enters a slot that is not free", slot=slot)
        _require(len(enter.chunk.token_ids) > 0, "a sequence enters without a token to compute", slot=slot)
        _require(num_tokens <= limits.context_length, "a sequence is longer than the context", slot=slot)
        _require(
            enter.num_cached_tokens >= 0 and enter.num_cached_tokens % limits.block_size == 0,
            "cached tokens are not whole blocks",
            slot=slot,
        )
        _require(0 < enter.num_prompt_tokens <= num_tokens, "num_prompt_tokens is out of range", slot=slot)
        _require(num_tokens <= len(enter.block_ids) * limits.block_size, "a block table is too short", slot=slot)
        is_sampling_good = (
            math.isfinite(enter.temperature)
            and enter.temperature >= 0.0
            and 0.0 < enter.top_p <= 1.0
            and 0 <= enter.top_k <= limits.logits_width
        )
        _require(is_sampling_good, "a sampling parameter is out of range", slot=slot)


def _require(condition: bool, message: str, **values: object) -> None:
    if not condition:
        raise StepMismatchError(message, violations=(), retry_delay_s=None, **values)
