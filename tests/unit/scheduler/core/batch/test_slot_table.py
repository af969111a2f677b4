"""Runs of tokens in the columns, one or several per step, until they are stored."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from services.scheduler.core.batch.sequence import TOKEN_BYTES, Sequence
from services.scheduler.core.batch.slot_table import RUN_TOKENS, SlotTable
from shared.ids import RequestHandle, Slot
from shared.request.limits import MAX_DRAFT_TOKENS, TOKEN_DTYPE
from shared.request.sampling_params import SamplingParams

MAX_TOKENS = 10_000


def take(
    table: SlotTable, prompt: list[int], *, watched: list[int] | None = None, max_tokens: int = MAX_TOKENS
) -> Slot:
    """Put a sequence with this prompt into a slot; returns the slot."""
    tokens = bytearray(np.array(prompt, TOKEN_DTYPE).tobytes())
    seq = Sequence("r", 1, RequestHandle(1), SamplingParams(max_tokens), tokens, len(prompt), arrived_at=0.0)
    return Slot(table.take(seq, watched or []))


def stored(table: SlotTable, slot: Slot) -> list[int]:
    tokens: list[int] = np.frombuffer(table.sequence_at(slot).token_bytes, TOKEN_DTYPE).tolist()
    return tokens


def append(table: SlotTable, runs: dict[Slot, list[int]]) -> None:
    """Append tokens to each slot, as one step does."""
    slots = np.array(list(runs), np.intp)
    positions = [int(table.num_tokens[slot]) + index for slot, run in runs.items() for index in range(len(run))]
    tokens = [token_id for run in runs.values() for token_id in run]
    counts = np.array([len(run) for run in runs.values()], np.int32)
    table.append_runs(slots, counts, np.array(positions, np.int32), np.array(tokens, np.int32))


def test_runs_of_different_lengths_are_appended_to_their_sequences() -> None:
    table = SlotTable(4, num_draft_tokens=3)
    first, second, third = take(table, [1, 2]), take(table, [3]), take(table, [4])
    append(table, {first: [10], second: [20, 21, 22, 23], third: []})
    append(table, {second: [24], first: [11, 12]})
    for slot in (first, second, third):
        table.flush(table.sequence_at(slot))
    assert [stored(table, slot) for slot in (first, second, third)] == [
        [1, 2, 10, 11, 12],
        [3, 20, 21, 22, 23, 24],
        [4],
    ]


def test_tokens_beyond_a_rows_placeholder_are_both_known_and_planned() -> None:
    table = SlotTable(1, num_draft_tokens=3)
    slot = take(table, [1, 2], max_tokens=20)
    table.num_planned[slot] += 2
    slots = np.array([slot], np.intp)
    # Each of two rows in flight returns 1 to 4 tokens.
    assert (int(table.num_planned[slot]), table.max_num_planned(slots).tolist()) == (4, [10])
    append(table, {slot: [7, 8, 9]})
    assert (int(table.num_tokens[slot]), int(table.num_planned[slot])) == (5, 6)
    assert table.max_num_planned(slots).tolist() == [9]


def test_no_sequence_is_planned_beyond_its_last_token() -> None:
    table = SlotTable(1, num_draft_tokens=8)
    slot = take(table, [1, 2], max_tokens=5)
    table.num_planned[slot] += 2
    assert table.max_num_planned(np.array([slot], np.intp)).tolist() == [7]


def test_watched_and_marked_tokens_are_reported_at_any_position() -> None:
    table = SlotTable(2, num_draft_tokens=3)
    first, second = take(table, [1], watched=[5, 6]), take(table, [1], watched=[7])
    slots = np.array([first, first, first, second, second], np.intp)
    token_ids = np.array([5, 7, 6, 5, 7], np.int32)
    assert table.find_watched(slots, token_ids).tolist() == [0, 2, 4]
    is_last = np.array([False, True, False, False, False])
    assert table.find_watched(slots, token_ids, is_last).tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("num_seqs", [1, 5, 64])
def test_a_row_waits_for_its_turn_to_be_stored_without_losing_a_token(num_seqs: int) -> None:
    rng = Random(num_seqs)
    table = SlotTable(num_seqs, num_draft_tokens=MAX_DRAFT_TOKENS)
    tokens = {
        take(table, [rng.randrange(1000) for _ in range(rng.randint(1, 70))]): list[int]() for _ in range(num_seqs)
    }
    prompts = {slot: stored(table, slot) for slot in tokens}
    slots = np.array(list(tokens), np.intp)
    for _ in range(300):
        table.flush_full_runs(slots)
        runs = {slot: [rng.randrange(1000) for _ in range(MAX_DRAFT_TOKENS + 1)] for slot in tokens}
        append(table, runs)
        for slot, run in runs.items():
            tokens[slot] += run
        # This many more may be in flight when a row's turn comes: 8 steps.
        longest = max(
            int(table.num_tokens[slot]) - len(table.sequence_at(slot).token_bytes) // TOKEN_BYTES for slot in runs
        )
        assert longest + 8 * (MAX_DRAFT_TOKENS + 1) <= 2 * RUN_TOKENS
    for slot, expected in tokens.items():
        table.flush(table.sequence_at(slot))
        assert stored(table, slot) == prompts[slot] + expected
