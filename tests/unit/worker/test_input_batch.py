from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.block_tables import BlockTables
from services.worker.input_batch import BatchLimits, InputBatch, StepInput
from services.worker.step import EnteringSequence, Step
from shared.errors import StepMismatchError
from tests.support.worker_steps import column, decode_step, make_enter, prefill_step

LIMITS = BatchLimits(
    max_num_seqs=6, max_num_batched_tokens=64, block_size=4, num_blocks=40, context_length=32, logits_width=100
)


@dataclass
class PlainSequence:
    """What a reader would write down of a sequence."""

    tokens: list[int]
    blocks: list[int]
    seed: int


def expect_rows(step_input: StepInput, sequences: dict[int, PlainSequence], query_lens: dict[int, int]) -> None:
    """Compare a step's input with what a loop over its rows says; the rows are those of `query_lens`, in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    for slot, query_len in query_lens.items():
        sequence = sequences[slot]
        for position in range(len(sequence.tokens) - query_len, len(sequence.tokens)):
            token_ids.append(sequence.tokens[position])
            positions.append(position)
            slot_mapping.append(sequence.blocks[position // 4] * 4 + position % 4)
    lengths = [len(sequences[slot].tokens) for slot in query_lens]
    width = max(-(-length // 4) for length in lengths)
    tables = [(sequences[slot].blocks + [0] * width)[:width] for slot in query_lens]
    assert step_input.slots.tolist() == list(query_lens)
    assert step_input.token_ids.tolist() == token_ids
    assert step_input.positions.tolist() == positions
    assert step_input.slot_mapping.tolist() == slot_mapping
    assert step_input.block_tables.tolist() == tables
    assert step_input.context_lens.tolist() == step_input.sampling.position.tolist() == lengths
    assert step_input.query_lens.tolist() == list(query_lens.values())
    assert step_input.cu_seqlens_q.tolist() == [0, *np.cumsum(list(query_lens.values()))]
    assert step_input.sampling.seed.tolist() == [sequences[slot].seed for slot in query_lens]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_changes_gives_the_rows_that_a_plain_model_gives(data: st.DataObject) -> None:
    batch = InputBatch(LIMITS)
    sequences: dict[int, PlainSequence] = {}
    leave: list[int] = []
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        for slot in data.draw(st.permutations(list(sequences)), label="leave")[: data.draw(st.integers(0, 2))]:
            del sequences[slot]
            leave.append(slot)
        free = [slot for slot in range(6) if slot not in sequences]
        num_enters = data.draw(st.integers(0, min(2, len(free))), label="enters")
        if num_enters:
            step, query_lens = _draw_prefill(data, sequences, free, num_enters, leave)
        else:
            # A sequence that fills its context gets no further row.
            rows = [slot for slot, sequence in sequences.items() if len(sequence.tokens) <= 32]
            if not rows:
                continue  # Who left is told with the next step.
            step, query_lens = _draw_decode(data, sequences, rows, leave)
        step_input = batch.apply(step)
        leave = []
        expect_rows(step_input, sequences, query_lens)
        sampled = data.draw(st.lists(st.integers(0, 99), min_size=len(query_lens), max_size=len(query_lens)))
        batch.record_sampled(step_input.slots, column(sampled))
        for slot, token_id in zip(query_lens, sampled, strict=True):
            sequences[slot].tokens.append(token_id)
        assert batch.num_seqs == len(sequences)


def _draw_prefill(
    data: st.DataObject, sequences: dict[int, PlainSequence], free: list[int], num_enters: int, leave: list[int]
) -> tuple[Step, dict[int, int]]:
    enters: list[EnteringSequence] = []
    query_lens: dict[int, int] = {}
    for slot in data.draw(st.permutations(free))[:num_enters]:
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=31))
        num_cached = 4 * data.draw(st.integers(0, (len(tokens) - 1) // 4))
        num_blocks = data.draw(st.integers(-(-len(tokens) // 4), 8))
        blocks = data.draw(st.lists(st.integers(0, 39), min_size=num_blocks, max_size=num_blocks))
        seed = data.draw(st.integers(0, 2**64 - 1))
        sequences[slot] = PlainSequence(tokens, blocks, seed)
        query_lens[slot] = len(tokens) - num_cached
        enter = make_enter(slot, tokens[num_cached:], blocks, num_cached_tokens=num_cached, seed=seed)
        enters.append(enter)
    return prefill_step(*enters, leave=leave), query_lens


def _draw_decode(
    data: st.DataObject, sequences: dict[int, PlainSequence], rows: list[int], leave: list[int]
) -> tuple[Step, dict[int, int]]:
    append: list[tuple[int, int]] = []
    for slot in rows:
        sequence = sequences[slot]
        while len(sequence.blocks) * 4 < len(sequence.tokens) or (
            len(sequence.blocks) < 8 and data.draw(st.booleans(), label="one more block")
        ):
            block = data.draw(st.integers(0, 39))
            sequence.blocks.append(block)
            append.append((slot, block))
    # Blocks of one slot keep their order, whatever stands between them.
    append.sort(key=lambda pair: pair[0] % 2)
    row_slots = data.draw(st.one_of(st.none(), st.permutations(rows)), label="row_slots")
    if row_slots is None and rows == list(sequences):
        return decode_step(leave=leave, append=append), dict.fromkeys(sequences, 1)
    row_slots = row_slots or rows
    return decode_step(leave=leave, append=append, rows=row_slots), dict.fromkeys(row_slots, 1)


def make_batch() -> InputBatch:
    """Slots 3 and 1, entered in that order, five and two tokens long, sampled once."""
    batch = InputBatch(LIMITS)
    step_input = batch.apply(prefill_step(make_enter(3, [1, 2, 3, 4, 5], [7, 8]), make_enter(1, [6, 7], [9])))
    batch.record_sampled(step_input.slots, column([50, 51]))
    return batch


GOOD = make_enter(0, [1, 2, 3, 4, 5], [10, 11])

BAD_ENTERS = {
    "slot above the limit": dataclasses.replace(GOOD, slot=6),
    "slot far above the limit": dataclasses.replace(GOOD, slot=2**32 - 1),
    "slot in use": dataclasses.replace(GOOD, slot=3),
    "no tokens": dataclasses.replace(GOOD, token_ids=column()),
    "negative token": dataclasses.replace(GOOD, token_ids=column([1, -1])),
    "token at the logits width": dataclasses.replace(GOOD, token_ids=column([100])),
    "table too short": dataclasses.replace(GOOD, block_ids=column([10])),
    "table empty": dataclasses.replace(GOOD, block_ids=column()),
    "block at the pool's size": dataclasses.replace(GOOD, block_ids=column([10, 40])),
    "negative block": dataclasses.replace(GOOD, block_ids=column([-1, 10])),
    "table longer than the context": dataclasses.replace(GOOD, block_ids=column(range(9))),
    "cached tokens not whole blocks": dataclasses.replace(GOOD, num_cached_tokens=3),
    "longer than the context": dataclasses.replace(GOOD, num_cached_tokens=28, block_ids=column(range(8))),
    "far longer than the context": dataclasses.replace(GOOD, num_cached_tokens=2**32 - 4),
    "no prompt": dataclasses.replace(GOOD, num_prompt_tokens=0),
    "prompt longer than the tokens": dataclasses.replace(GOOD, num_prompt_tokens=6),
    "temperature NaN": dataclasses.replace(GOOD, temperature=float("nan")),
    "temperature infinite": dataclasses.replace(GOOD, temperature=float("inf")),
    "temperature negative": dataclasses.replace(GOOD, temperature=-0.5),
    "top_p 0": dataclasses.replace(GOOD, top_p=0.0),
    "top_p NaN": dataclasses.replace(GOOD, top_p=float("nan")),
    "top_k above the logits width": dataclasses.replace(GOOD, top_k=101),
}


@pytest.mark.parametrize("enter", BAD_ENTERS.values(), ids=BAD_ENTERS.keys())
def test_a_sequence_that_cannot_be_computed_is_refused(enter: EnteringSequence) -> None:
    with pytest.raises(StepMismatchError):
        make_batch().apply(prefill_step(enter))


BAD_STEPS = {
    "leave: slot above the limit": decode_step(leave=[6]),
    "leave: negative slot": decode_step(leave=[-1]),
    "leave: slot not in use": decode_step(leave=[0]),
    "leave: twice": decode_step(leave=[1, 1]),
    "append: slot above the limit": decode_step(append=[(6, 1)]),
    "append: negative slot": decode_step(append=[(-3, 1)]),
    "append: slot not in use": decode_step(append=[(2, 1)]),
    "append: to a slot that leaves": decode_step(leave=[1], append=[(1, 1)]),
    "append: block at the pool's size": decode_step(append=[(1, 40)]),
    "append: negative block": decode_step(append=[(1, -1)]),
    "append: table longer than the context": decode_step(append=[(1, 2)] * 8),
    "append: columns of different length": dataclasses.replace(decode_step(), append_slots=column([1])),
    "rows: slot above the limit": decode_step(rows=[6]),
    "rows: negative slot": decode_step(rows=[-1]),
    "rows: slot not in use": decode_step(rows=[1, 0]),
    "rows: slot that leaves": decode_step(leave=[1], rows=[1]),
    "rows: twice": decode_step(rows=[1, 3, 1]),
    "rows: none": decode_step(rows=[]),
    "rows: everyone left": decode_step(leave=[1, 3]),
    "decode: a sequence enters": dataclasses.replace(decode_step(), enters=(GOOD,)),
    "prefill: nobody enters": prefill_step(),
    "prefill: with row_slots": dataclasses.replace(prefill_step(GOOD), row_slots=column([0])),
    "prefill: the same slot twice": prefill_step(GOOD, GOOD),
    "prefill: more tokens than the budget": prefill_step(*(make_enter(slot, [1] * 24, range(6)) for slot in (0, 2, 4))),
}


@pytest.mark.parametrize("step", BAD_STEPS.values(), ids=BAD_STEPS.keys())
def test_a_step_that_does_not_fit_the_batch_is_refused(step: Step) -> None:
    with pytest.raises(StepMismatchError):
        make_batch().apply(step)


def test_a_decode_whose_table_is_full_is_refused_until_it_gets_a_block() -> None:
    batch = InputBatch(LIMITS)
    step_input = batch.apply(prefill_step(make_enter(0, [1, 2, 3, 4], [5])))
    batch.record_sampled(step_input.slots, column([9]))
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step())
    assert batch.apply(decode_step(append=[(0, 17)])).slot_mapping.tolist() == [17 * 4]


def test_a_sequence_that_fills_the_context_is_computed_but_not_continued() -> None:
    batch = InputBatch(LIMITS)
    step_input = batch.apply(prefill_step(make_enter(0, [1] * 32, range(8))))
    assert step_input.positions.tolist() == list(range(32))
    batch.record_sampled(step_input.slots, column([9]))
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step())


def test_more_rows_than_the_token_budget_are_refused() -> None:
    batch = InputBatch(dataclasses.replace(LIMITS, max_num_batched_tokens=1))
    for slot in (0, 1):
        step_input = batch.apply(prefill_step(make_enter(slot, [1], [slot])))
        batch.record_sampled(step_input.slots, column([1]))
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step())


def test_a_slot_is_entered_again_in_the_step_in_which_it_is_left() -> None:
    batch = make_batch()
    step_input = batch.apply(prefill_step(make_enter(3, [8], [20]), leave=[3]))
    assert (step_input.token_ids.tolist(), step_input.block_tables.tolist()) == ([8], [[20]])
    batch.record_sampled(step_input.slots, column([60]))
    decoded = batch.apply(decode_step())
    assert (decoded.slots.tolist(), decoded.token_ids.tolist()) == ([1, 3], [51, 60])


def test_row_slots_hold_for_one_step_only() -> None:
    batch = make_batch()
    assert batch.apply(decode_step(rows=[1])).slots.tolist() == [1]
    assert batch.apply(decode_step()).slots.tolist() == [3, 1]


def test_arrays_of_a_step_do_not_change_with_the_next_one() -> None:
    batch = make_batch()
    first = batch.apply(decode_step())
    copies = (first.token_ids.copy(), first.block_tables.copy(), first.context_lens.copy(), first.slots.copy())
    batch.record_sampled(first.slots, column([1, 2]))
    batch.apply(prefill_step(make_enter(3, [8], [20]), leave=[3]))
    for array, copy in zip((first.token_ids, first.block_tables, first.context_lens, first.slots), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_block_tables_take_memory_for_the_longest_table_not_for_the_context() -> None:
    tables = BlockTables(num_slots=512, num_pool_blocks=131072, max_blocks_per_sequence=131072)
    assert tables.num_bytes < 100_000
    tables.set(0, np.arange(1000, dtype=np.int32))
    assert tables.num_bytes < 3_000_000
    np.testing.assert_array_equal(tables.rows(column([0]), 1000)[0], np.arange(1000))


def test_a_table_that_a_slot_had_before_leaves_nothing_behind() -> None:
    tables = BlockTables(num_slots=2, num_pool_blocks=50, max_blocks_per_sequence=40)
    tables.set(1, np.arange(1, 31, dtype=np.int32))
    tables.clear(column([1]))
    tables.set(1, column([5]))
    assert tables.rows(column([1]), 30).tolist() == [[5] + [0] * 29]
