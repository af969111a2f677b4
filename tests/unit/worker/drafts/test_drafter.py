"""Drafts looked up in a sequence's own tokens, and how much is drafted depending on their success."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from services.worker.batch.block_tables import BlockTables
from services.worker.batch.decodes import DraftRoom, Drafts
from services.worker.drafts import drafter as drafter_module
from services.worker.drafts.drafter import Drafter
from services.worker.drafts.ngram_drafts import LookupProposer, NgramProposer
from shared.step.columns import Int32Column
from tests.support.worker.worker_steps import column

TABLES = BlockTables(num_slots=8, num_pool_blocks=8, max_blocks_per_sequence=8)


def propose(tokens: list[int], max_tokens: int = 8, *, min_ngram: int = 2, max_ngram: int = 4) -> list[int]:
    proposer = NgramProposer(min_ngram=min_ngram, max_ngram=max_ngram)
    return [int(token) for token in proposer.look_up(column(tokens), max_tokens)]


def expected_drafts(tokens: list[int], max_tokens: int, min_ngram: int, max_ngram: int) -> list[int]:
    """The definition, position by position."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for place in range(start + size, start + size + max_tokens):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_tokens=st.integers(1, 8),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_the_tokens_after_the_longest_and_latest_match_are_proposed(
    tokens: list[int], max_tokens: int, min_ngram: int, more: int
) -> None:
    max_ngram = min_ngram + more
    actual = propose(tokens, max_tokens, min_ngram=min_ngram, max_ngram=max_ngram)
    assert actual == expected_drafts(tokens, max_tokens, min_ngram, max_ngram)


def test_a_longer_match_takes_precedence_over_a_later_one() -> None:
    assert propose([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 1) == [50]


def test_the_later_of_equal_matches_takes_precedence() -> None:
    assert propose([2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 1) == [60]


def test_text_with_a_short_period_is_continued_in_full() -> None:
    assert propose([8, 1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_nothing_is_proposed_without_a_match_of_the_minimum_length() -> None:
    assert propose([1, 2, 3, 4]) == []
    assert propose([9, 4, 1, 4]) == []
    assert propose([5]) == []


class CountingProposer(LookupProposer):
    """Proposes as many tokens as allowed; records the limits."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        self.limits.append(max_tokens)
        return np.arange(max_tokens, dtype=np.int32)


def make_drafter(proposer: CountingProposer, *slots: int, most: int = 8) -> Drafter:
    drafter = Drafter(proposer, most)
    for slot in slots:
        drafter.enter(slot, column([1, 2]), 1000)
    return drafter


def room_for(slots: Sequence[int], most: list[int], most_together: int) -> DraftRoom:
    return DraftRoom(column(slots), column([2] * len(slots)), column(most), most_together, TABLES)


def step(drafter: Drafter, *slots: int, num_right: int | None = None) -> Drafts:
    """Draft for these slots; of each draft, `num_right` tokens are right, or all."""
    proposed = drafter.propose(room_for(slots, [100] * len(slots), 100))
    counts = proposed.counts + 1 if num_right is None else np.minimum(proposed.counts, num_right) + 1
    drafter.record(column(slots), np.zeros(counts.sum(), np.int32), counts.astype(np.int32), proposed.counts)
    return proposed


def test_right_drafts_grow_to_the_maximum() -> None:
    proposer = CountingProposer()
    drafter = make_drafter(proposer, 3, most=5)
    for _ in range(4):
        step(drafter, 3)
    assert proposer.limits == [2, 4, 5, 5]


def test_a_partly_right_draft_is_followed_by_one_that_is_a_token_longer() -> None:
    proposer = CountingProposer()
    drafter = make_drafter(proposer, 3)
    step(drafter, 3)
    step(drafter, 3)
    step(drafter, 3, num_right=2)
    step(drafter, 3, num_right=2)
    assert proposer.limits == [2, 4, 8, 3]


def test_a_sequence_whose_drafts_fail_drafts_less_and_less_often() -> None:
    proposer = CountingProposer()
    drafter = make_drafter(proposer, 3)
    has_drafts = [int(step(drafter, 3, num_right=0).counts[0] > 0) for _ in range(100)]
    assert [index for index, has in enumerate(has_drafts) if has] == [0, 1, 3, 7, 15, 31, 63, 96]
    assert proposer.limits == [2, 1, 1, 1, 1, 1, 1, 1]


def test_one_right_token_ends_the_backoff() -> None:
    proposer = CountingProposer()
    drafter = make_drafter(proposer, 3)
    for _ in range(7):
        step(drafter, 3, num_right=0)
    step(drafter, 3)
    step(drafter, 3, num_right=0)
    assert [len(step(drafter, 3).token_ids) for _ in range(3)] == [1, 2, 4]


def test_sequences_adapt_independently() -> None:
    drafter = make_drafter(CountingProposer(), 3, 5)
    step(drafter, 3, num_right=0)
    step(drafter, 5)
    assert step(drafter, 5, 3).counts.tolist() == [4, 1]


def test_a_reused_slot_starts_anew() -> None:
    seen: list[list[int]] = []

    class RecordingProposer(CountingProposer):
        def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
            seen.append(token_ids.tolist())
            return super().look_up(token_ids, max_tokens)

    drafter = make_drafter(RecordingProposer(), 0)
    step(drafter, 0, num_right=0)
    drafter.leave(column([0]))
    drafter.enter(0, column([7]), 10)
    drafter.extend(0, column([8, 9]))
    assert step(drafter, 0).counts.tolist() == [2]
    assert seen == [[1, 2], [7, 8, 9]]


@pytest.mark.parametrize("counts", [None, column([1, 1])])
def test_tokens_without_drafts_are_known_too(counts: Int32Column | None) -> None:
    seen: list[list[int]] = []

    class RecordingProposer(CountingProposer):
        def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
            seen.append(token_ids.tolist())
            return token_ids[:0]

    drafter = make_drafter(RecordingProposer(), 0, 1)
    drafter.record(column([1, 0]), column([50, 60]), counts, None)
    drafter.propose(room_for([0, 1], [1, 1], 2))
    assert seen == [[1, 2, 60], [1, 2, 50]]


def test_the_drafts_of_all_sequences_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_module, "_MAX_DRAFTED_TOGETHER", 3)
    drafter = make_drafter(CountingProposer(), 0, 1, 2)
    assert step(drafter, 0, 1, 2).counts.tolist() == [2, 1, 0]
