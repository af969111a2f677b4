"""Decodes with drafts: what is computed for them and where, and what happens to sequences with all their tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafter import Drafter
from services.worker.drafts.ngram_drafts import LookupProposer
from shared.errors import StepMismatchError
from shared.step.columns import Int32Column
from shared.step.step import Step
from tests.support.worker.worker_steps import column, decode_step, make_chunk, make_enter, mixed_step, prefill_step

LIMITS = BatchLimits(
    max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_blocks=40, context_length=32, logits_width=100
)
MOST = 3


@dataclass
class ScriptedProposer(LookupProposer):
    """Proposes what a test sets, by the sequence's tokens; records its queries."""

    guesses: dict[tuple[int, ...], list[int]]
    queries: list[tuple[tuple[int, ...], int]] = dataclasses.field(default_factory=list)

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        tokens = tuple(token_ids.tolist())
        self.queries.append((tokens, max_tokens))
        return column(self.guesses.get(tokens, [])[:max_tokens])


def make_batch(proposer: ScriptedProposer, limits: BatchLimits = LIMITS) -> InputBatch:
    return InputBatch(limits, drafter=Drafter(proposer, MOST))


def record(batch: InputBatch, step_input: StepInput, token_ids: Int32Column, counts: Int32Column | None = None) -> None:
    """Append the tokens of a step."""
    batch.record_sampled(step_input.row_slots, token_ids, counts, step_input.draft_counts)


def begin(batch: InputBatch, step: Step, *sampled: int) -> StepInput:
    step_input = batch.apply(step)
    record(batch, step_input, column(sampled))
    return step_input


def computed(batch: InputBatch, step: Step) -> list[int]:
    token_ids: list[int] = batch.apply(step).arrays["token_ids"].tolist()
    return token_ids


def test_a_row_computes_its_last_token_and_the_drafts_after_it() -> None:
    batch = make_batch(ScriptedProposer({(1, 2, 3, 4, 9): [5, 6], (7, 8): []}))
    begin(batch, prefill_step(make_enter(2, [1, 2, 3, 4], [10, 11]), make_enter(0, [7], [20])), 9, 8)
    step_input = batch.apply(decode_step())
    assert step_input.is_prefill is False
    assert step_input.row_slots.tolist() == [2, 0]
    assert (step_input.row_indexes, step_input.row_numbers, step_input.num_result_rows) == (None, None, 2)
    assert step_input.arrays["token_ids"].tolist() == [9, 5, 6, 8]
    assert step_input.arrays["positions"].tolist() == [4, 5, 6, 1]
    assert step_input.arrays["slot_mapping"].tolist() == [44, 45, 46, 81]
    assert step_input.context_lens.tolist() == [7, 2]
    assert step_input.query_lens.tolist() == [3, 1]
    assert step_input.cu_seqlens_q.tolist() == [0, 3, 4]
    assert "logit_tokens" not in step_input.arrays
    assert step_input.draft_counts is not None
    assert (step_input.draft_counts.tolist(), step_input.runs.wanted.tolist()) == ([2, 0], [5, 6, -1, -1])
    assert step_input.row_positions.tolist() == [5, 2]


def test_a_plain_decode_uploads_its_slots_once_if_nothing_reads_its_tokens() -> None:
    batch = InputBatch(LIMITS, drafter=Drafter(ScriptedProposer({(7, 8, 9, 5): [6]}), MOST), makes_decodes=False)
    begin(batch, prefill_step(make_enter(2, [1, 2, 3], [10, 11]), make_enter(0, [7], [20, 21])), 4, 8)
    assert list(begin(batch, decode_step(), 4, 9).arrays) == ["decode_slots"]
    assert list(begin(batch, decode_step(), 4, 5).arrays) == []
    assert computed(batch, decode_step()) == [4, 5, 6]


def test_a_step_without_drafts_has_no_draft_counts() -> None:
    batch = make_batch(ScriptedProposer({}))
    begin(batch, prefill_step(make_enter(2, [1, 2, 3, 4], [10, 11])), 9)
    step_input = batch.apply(decode_step())
    assert step_input.draft_counts is None
    assert not len(step_input.runs.drafted())


@pytest.mark.parametrize(("count", "next_token", "position"), [(1, 50, 5), (2, 51, 6), (3, 52, 7)])
def test_the_next_step_starts_from_the_last_accepted_token(count: int, next_token: int, position: int) -> None:
    batch = make_batch(ScriptedProposer({(1, 2, 3, 4, 9): [50, 51]}))
    begin(batch, prefill_step(make_enter(2, [1, 2, 3, 4], [10, 11])), 9)
    step_input = batch.apply(decode_step())
    record(batch, step_input, column([50, 51, 52][:count]), column([count]))
    after = batch.apply(decode_step())
    # The cache entries after that position belonged to wrong drafts.
    assert (after.arrays["token_ids"].tolist(), after.arrays["positions"].tolist()) == ([next_token], [position])
    assert after.arrays["slot_mapping"].tolist() == [44 + position - 4]
    assert after.context_lens.tolist() == [position + 1]


def test_a_proposer_sees_all_known_tokens_in_order() -> None:
    proposer = ScriptedProposer({(1, 2, 3, 4, 5, 6, 9): [7, 8]})
    batch = make_batch(proposer)
    enter = make_enter(2, [5], [10, 11, 12], num_cached_tokens=4, num_later_tokens=1, cached_token_ids=[1, 2, 3, 4])
    batch.apply(prefill_step(enter))
    begin(batch, prefill_step(chunks=[make_chunk(2, [6])]), 9)
    step_input = batch.apply(decode_step())
    record(batch, step_input, column([7, 30]), column([2]))
    batch.apply(decode_step())
    assert [tokens for tokens, _ in proposer.queries] == [(1, 2, 3, 4, 5, 6, 9), (1, 2, 3, 4, 5, 6, 9, 7, 30)]


@pytest.mark.parametrize(
    ("limits", "num_blocks", "max_num_tokens", "num_drafts"),
    [
        pytest.param(LIMITS, 3, 100, 2, id="enough"),
        pytest.param(LIMITS, 2, 100, 1, id="the table is full"),
        pytest.param(LIMITS, 3, 10, 2, id="max_num_tokens, just enough: one more is drawn after the drafts"),
        pytest.param(LIMITS, 3, 9, 1, id="max_num_tokens"),
        pytest.param(LIMITS, 3, 8, 0, id="max_num_tokens, only one is left"),
        pytest.param(dataclasses.replace(LIMITS, context_length=7), 2, 100, 0, id="context"),
    ],
)
def test_drafts_end_where_there_is_no_room(
    limits: BatchLimits, num_blocks: int, max_num_tokens: int, num_drafts: int
) -> None:
    proposer = ScriptedProposer({(1, 2, 3, 4, 5, 6, 9): [60, 61, 62]})
    batch = make_batch(proposer, limits)
    enter = make_enter(2, [1, 2, 3, 4, 5, 6], range(10, 10 + num_blocks), max_num_tokens=max_num_tokens)
    begin(batch, prefill_step(enter), 9)
    assert computed(batch, decode_step()) == [9, 60, 61][: 1 + num_drafts]


def test_drafts_get_the_tokens_that_rows_and_chunks_leave_in_a_step() -> None:
    limits = dataclasses.replace(LIMITS, max_num_batched_tokens=6)
    guesses: dict[tuple[int, ...], list[int]] = {(1, 7): [60, 61], (2, 8): [62, 63], (3, 9): [64, 65]}
    batch = make_batch(ScriptedProposer(guesses), limits)
    begin(batch, prefill_step(*(make_enter(slot, [slot + 1], [slot]) for slot in range(3))), 7, 8, 9)
    step_input = batch.apply(decode_step())
    assert step_input.arrays["token_ids"].tolist() == [7, 60, 61, 8, 62, 9]
    record(batch, step_input, column([5, 5, 5]), column([1, 1, 1]))
    full = batch.apply(mixed_step(make_enter(3, [30, 31, 32], [30])))
    assert full.arrays["token_ids"].tolist() == [5, 5, 5, 30, 31, 32]
    assert full.draft_counts is None


def make_full_batch() -> InputBatch:
    """Slots 0, 1 and 2 in this order; 1 has all its tokens, and its last one opened a block that it does not have."""
    batch = make_batch(ScriptedProposer({(1, 7): [60], (1, 7, 50): [61], (5, 6, 7): [62]}))
    enters = [
        make_enter(0, [1], [10]),
        make_enter(1, [1, 2, 3], [11], max_num_tokens=5),
        make_enter(2, [5, 6], [12]),
    ]
    begin(batch, prefill_step(*enters), 7, 8, 7)
    step_input = batch.apply(decode_step(rows=[1]))
    record(batch, step_input, column([9]), column([1]))
    return batch


def test_nothing_is_computed_for_a_sequence_that_has_all_its_tokens() -> None:
    batch = make_full_batch()
    step_input = batch.apply(decode_step())
    assert step_input.num_result_rows == 3
    assert step_input.row_numbers is not None
    assert step_input.row_numbers.tolist() == [0, 2]
    assert step_input.row_slots.tolist() == [0, 2]
    assert step_input.arrays["token_ids"].tolist() == [7, 60, 7, 62]
    assert step_input.cu_seqlens_q.tolist() == [0, 2, 4]


def test_rows_after_one_that_has_all_its_tokens_keep_their_numbers() -> None:
    batch = make_full_batch()
    step_input = batch.apply(mixed_step(make_enter(3, [30, 31], [30]), rows=[1, 2]))
    assert step_input.num_result_rows == 3
    assert step_input.row_numbers is not None
    assert step_input.row_numbers.tolist() == [1, 2]
    assert step_input.row_slots.tolist() == [2, 3]
    assert step_input.row_indexes is not None
    assert step_input.row_indexes.tolist() == [0, 1]
    assert step_input.arrays["token_ids"].tolist() == [7, 62, 30, 31]
    assert step_input.arrays["logit_tokens"].tolist() == [0, 1, 3]


def test_a_step_whose_rows_all_have_their_tokens_computes_nothing() -> None:
    batch = make_full_batch()
    step_input = batch.apply(decode_step(rows=[1]))
    assert (step_input.num_result_rows, len(step_input.row_slots), step_input.num_tokens) == (1, 0, 0)
    assert batch.apply(decode_step(rows=[0])).row_slots.tolist() == [0]


def test_a_worker_that_drafts_needs_the_cached_tokens() -> None:
    batch = make_batch(ScriptedProposer({}))
    with pytest.raises(StepMismatchError):
        batch.apply(prefill_step(make_enter(2, [5], [10, 11], num_cached_tokens=4)))


@settings(max_examples=60)
@given(data=st.data())
def test_known_tokens_are_computed_under_any_drafts_and_acceptance(data: st.DataObject) -> None:
    @dataclass
    class DrawnProposer(LookupProposer):
        def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
            assert token_ids.tolist() in tokens.values()
            return column(data.draw(st.lists(st.integers(0, 99), max_size=max_tokens), label="drafts"))

    batch = InputBatch(LIMITS, drafter=Drafter(DrawnProposer(), MOST))
    tokens: dict[int, list[int]] = {}
    enters = []
    for slot in data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True)):
        tokens[slot] = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
        most = data.draw(st.integers(len(tokens[slot]) + 1, 32), label="max_num_tokens")
        enters.append(make_enter(slot, tokens[slot], range(10 * slot, 10 * slot + 8), max_num_tokens=most))
    limits = {enter.chunk.slot: enter.max_num_tokens for enter in enters}
    step_input = batch.apply(prefill_step(*enters))
    for _ in range(data.draw(st.integers(1, 8), label="steps")):
        starts = [int(place) for place in step_input.cu_seqlens_q]
        counts = []
        sampled = []
        for index, slot in enumerate(step_input.row_slots.tolist()):
            computed = step_input.arrays["token_ids"][starts[index] : starts[index + 1]].tolist()
            num_drafts = 0 if step_input.draft_counts is None else step_input.draft_counts[index]
            drafts = computed[len(computed) - num_drafts :]
            num_known = len(tokens[slot]) - (len(computed) - num_drafts)
            assert computed == tokens[slot][num_known:] + drafts
            positions = step_input.arrays["positions"][starts[index] : starts[index + 1]].tolist()
            assert positions == list(range(num_known, num_known + len(computed)))
            places = [(10 * slot + position // 4) * 4 + position % 4 for position in positions]
            assert step_input.arrays["slot_mapping"][starts[index] : starts[index + 1]].tolist() == places
            accepted = drafts[: data.draw(st.integers(0, num_drafts), label="accepted")]
            run = [*accepted, data.draw(st.integers(0, 99))]
            tokens[slot] += run
            counts.append(len(run))
            sampled += run
            assert len(tokens[slot]) <= limits[slot]
        record(batch, step_input, column(sampled), column(counts))
        step_input = batch.apply(decode_step())
        full = [slot for slot, most in limits.items() if len(tokens[slot]) == most]
        assert [slot for slot in tokens if slot not in full] == step_input.row_slots.tolist()
        assert step_input.num_result_rows == len(tokens)
