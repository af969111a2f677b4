"""Rows with several tokens each: which tokens count, and which counts are invalid."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.batch.row_tokens import RowTokens
from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.batch.slot_table import SlotTable
from shared.ids import RequestHandle, Slot
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import SamplingParams
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs


def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def rows(*runs: list[int], logprobs: Logprobs | None = None) -> RowTokens:
    """Rows of the slots 0, 1, and so on."""
    token_ids = column(*(token_id for run in runs for token_id in run))
    return RowTokens(np.arange(len(runs)), token_ids, column(*map(len, runs)), logprobs)


def logprobs_of(token_ids: list[int]) -> Logprobs:
    """The log-probabilities of these tokens, one entry each."""
    indexes = np.arange(len(token_ids), dtype=np.int32)
    ones = np.ones(len(token_ids), np.int32)
    return Logprobs(indexes, ones, ones, column(*token_ids), np.zeros(len(token_ids), np.float32))


def make_slots(*num_left: int, num_draft_tokens: int = 3) -> SlotTable:
    """Slots 0, 1, and so on, with sequences that may have this many more tokens."""
    table = SlotTable(len(num_left), num_draft_tokens)
    for number, max_tokens in enumerate(num_left):
        prompt = bytearray(np.array([1, 2], TOKEN_DTYPE).tobytes())
        seq = Sequence("r", 1, RequestHandle(number), SamplingParams(max_tokens), prompt, 2, 0.0)
        assert table.take(seq, []) == number
    return table


def test_each_token_gets_its_row_and_its_position() -> None:
    row_numbers, positions = rows([5], [6, 7, 8], [], [9, 10]).places(column(10, 20, 30, 40))
    assert row_numbers.tolist() == [0, 1, 1, 1, 3, 3]
    assert positions.tolist() == [10, 20, 21, 22, 40, 41]


def test_omitted_rows_take_their_tokens_and_log_probabilities_with_them() -> None:
    kept = rows([5], [6, 7], [8, 9], logprobs=logprobs_of([5, 6, 7, 8, 9])).of_rows(np.array([True, False, True]))
    assert kept.counts is not None
    assert kept.logprobs is not None
    assert (kept.slots.tolist(), kept.counts.tolist(), kept.token_ids.tolist()) == ([0, 2], [1, 2], [5, 8, 9])
    assert (kept.logprobs.indexes.tolist(), kept.logprobs.token_ids.tolist()) == ([0, 1, 2], [5, 8, 9])


@pytest.mark.parametrize("counts", [None, column(1, 1, 1)])
def test_a_row_can_drop_its_last_token(counts: Int32Column | None) -> None:
    plain = RowTokens(np.array([3, 1, 2]), column(7, 8, 9), counts, logprobs_of([7, 8, 9]))
    left = plain.without_last(column(0, 2))
    assert left.counts is not None
    assert left.logprobs is not None
    assert (left.slots.tolist(), left.counts.tolist(), left.token_ids.tolist()) == ([3, 1, 2], [0, 1, 0], [8])
    assert (left.logprobs.indexes.tolist(), left.logprobs.token_ids.tolist()) == ([0], [8])
    longer = rows([5], [6, 7, 8], []).without_last(column(1, 2))
    assert longer.counts is not None
    assert (longer.counts.tolist(), longer.token_ids.tolist()) == ([1, 2, 0], [5, 6, 7])


def test_rows_of_one_token_each_can_be_omitted_too() -> None:
    plain = RowTokens(np.array([3, 1, 2]), column(7, 8, 9), logprobs=logprobs_of([7, 8, 9]))
    kept = plain.of_rows(np.array([False, True, True]))
    assert (kept.slots.tolist(), kept.counts, kept.token_ids.tolist()) == ([1, 2], None, [8, 9])
    assert kept.logprobs is not None
    assert (kept.logprobs.indexes.tolist(), kept.logprobs.token_ids.tolist()) == ([0, 1], [8, 9])


def test_tokens_after_a_stop_are_cut_off_with_their_log_probabilities() -> None:
    cut = rows([5, 6, 7], [8], [9, 10, 11], logprobs=logprobs_of([5, 6, 7, 8, 9, 10, 11])).cut(column(1, 1, 2))
    assert cut.counts is not None
    assert cut.logprobs is not None
    assert (cut.counts.tolist(), cut.token_ids.tolist()) == ([1, 1, 2], [5, 8, 9, 10])
    assert (cut.logprobs.indexes.tolist(), cut.logprobs.token_ids.tolist()) == ([0, 1, 2, 3], [5, 8, 9, 10])


@pytest.mark.parametrize(
    ("runs", "num_left"),
    [([[1], [2]], (5, 5)), ([[1, 2, 3, 4], [5]], (4, 1)), ([[1, 2], [3, 4, 5]], (2, 3))],
)
def test_one_token_up_to_the_number_of_drafts_plus_one_is_valid(
    runs: list[list[int]], num_left: tuple[int, ...]
) -> None:
    assert rows(*runs).find_bad_counts(make_slots(*num_left), column()) is None


@pytest.mark.parametrize(
    ("runs", "num_left", "problem"),
    [
        ([[1, 2, 3, 4, 5], [6]], (9, 9), "a token count is out of range"),
        ([[], [6]], (9, 9), "a sequence gets no token, or more than it may have"),
        ([[1, 2], [6]], (1, 9), "a sequence gets no token, or more than it may have"),
        ([[1]], (9, 9), "1 token counts for 2 rows"),
    ],
)
def test_counts_that_no_sequence_can_have_are_invalid(
    runs: list[list[int]], num_left: tuple[int, ...], problem: str
) -> None:
    returned = rows(*runs)
    returned = RowTokens(np.arange(len(num_left)), returned.token_ids, returned.counts)
    assert returned.find_bad_counts(make_slots(*num_left), column()) == problem


def test_counts_that_do_not_add_up_are_invalid() -> None:
    returned = RowTokens(np.arange(2), column(1, 2, 3), column(1, 1))
    assert returned.find_bad_counts(make_slots(9, 9), column()) == "3 tokens for rows that count 2"
    returned = RowTokens(np.arange(2), column(1, 2, 3), column(4, -1))
    assert returned.find_bad_counts(make_slots(9, 9), column()) == "a token count is out of range"
    plain = RowTokens(np.arange(2), column(1, 2, 3))
    assert plain.find_bad_counts(make_slots(9, 9, num_draft_tokens=0), column()) == "3 tokens for 2 rows"


def test_a_row_whose_tokens_are_discarded_may_have_any_count() -> None:
    slots = make_slots(1, 9)
    assert rows([1, 2, 3], [4]).find_bad_counts(slots, column(0)) is None
    slots.end(Slot(0))
    assert rows([], [4]).find_bad_counts(slots, column()) is None
    assert rows([1, 2, 3], [4]).find_bad_counts(slots, column()) is None
