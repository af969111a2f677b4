from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.batch.block_tables import BlockTables
from services.worker.batch.device_batch import DeviceBatch
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput
from services.worker.ops import DecodeRows, load_ops
from shared.errors import StepMismatchError
from shared.request.sampling_params import SamplingOptions
from shared.step.step import EnteringSequence, PrefillChunk, Step, StepKind
from tests.support.worker.worker_steps import (
    column,
    decode_step,
    make_chunk,
    make_enter,
    mixed_step,
    pack,
    prefill_step,
    to_columns,
    unpack,
    with_params,
)

LIMITS = BatchLimits(
    max_num_seqs=6, max_num_batched_tokens=64, block_size=4, num_blocks=40, context_length=32, logits_width=100
)


@dataclass
class PlainSequence:
    """A sequence as a plain record; `later` are the tokens of its prompt that are still to come."""

    tokens: list[int]
    later: list[int]
    blocks: list[int]
    seed: int


def expect_rows(
    batch: InputBatch, step_input: StepInput, sequences: dict[int, PlainSequence], query_lens: dict[int, int]
) -> None:
    """Compare a step's input with a plain loop; the step computes the sequences of `query_lens`, in order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    for index, (slot, query_len) in enumerate(query_lens.items()):
        sequence = sequences[slot]
        for position in range(len(sequence.tokens) - query_len, len(sequence.tokens)):
            # Only the device knows which tokens are decoded.
            token_ids.append(0 if index < step_input.num_decodes else sequence.tokens[position])
            positions.append(position)
            slot_mapping.append(sequence.blocks[position // 4] * 4 + position % 4)
    lengths = [len(sequences[slot].tokens) for slot in query_lens]
    width = max(-(-length // 4) for length in lengths)
    tables = [(sequences[slot].blocks + [0] * width)[:width] for slot in query_lens]
    rows = [slot for slot in query_lens if not sequences[slot].later]
    assert step_input.row_slots.tolist() == rows
    assert step_input.arrays["token_ids"].tolist() == token_ids
    assert step_input.arrays["positions"].tolist() == positions
    assert step_input.arrays["slot_mapping"].tolist() == slot_mapping
    assert step_input.arrays["block_tables"].tolist() == tables
    assert step_input.context_lens.tolist() == lengths
    assert step_input.query_lens.tolist() == list(query_lens.values())
    assert step_input.cu_seqlens_q.tolist() == [0, *np.cumsum(list(query_lens.values()))]
    assert step_input.row_positions.tolist() == [len(sequences[slot].tokens) for slot in rows]
    assert batch.sampling(step_input).seed.tolist() == [sequences[slot].seed for slot in rows]
    in_order = range(len(query_lens)) if step_input.row_indexes is None else step_input.row_indexes
    assert [list(query_lens)[index] for index in in_order] == rows


class DevicePart:
    """The device's part of the batch, which gets only a step's changes and what it drew."""

    def __init__(self) -> None:
        self._columns = DeviceBatch(load_ops("reference"), LIMITS, torch.device("cpu"))

    def check_and_record(self, step_input: StepInput, sequences: dict[int, PlainSequence], sampled: list[int]) -> None:
        """Compare the inputs that it makes with those of a plain loop, then record `sampled`."""
        arrays = {name: torch.from_numpy(values) for name, values in step_input.arrays.items()}
        slots, token_ids = torch.from_numpy(step_input.slots).long(), torch.tensor(sampled, dtype=torch.int64)
        if not step_input.is_plain_decode:
            self._columns.apply(arrays, step_input.table_width)
            decodes = [sequences[slot].tokens[-1] for slot in step_input.slots[: step_input.num_decodes].tolist()]
            assert self._columns.last_tokens(slots[: step_input.num_decodes]).tolist() == decodes
            row_slots = torch.from_numpy(step_input.row_slots).long()
            self._columns.record(row_slots, token_ids, torch.from_numpy(step_input.row_positions))
            return
        self._columns.apply(arrays, step_input.table_width)
        rows = DecodeRows.empty(len(slots), step_input.num_blocks, torch.device("cpu"))
        self._columns.advance(rows, step_input.num_blocks)
        chosen = [sequences[slot] for slot in step_input.slots.tolist()]
        lengths = [len(sequence.tokens) for sequence in chosen]
        assert rows.token_ids.tolist() == [sequence.tokens[-1] for sequence in chosen]
        assert rows.positions.tolist() == [length - 1 for length in lengths]
        assert rows.slot_mapping.tolist() == [
            sequence.blocks[(length - 1) // 4] * 4 + (length - 1) % 4
            for sequence, length in zip(chosen, lengths, strict=True)
        ]
        assert rows.context_lens.tolist() == lengths
        for row, sequence, length in zip(rows.block_tables.tolist(), chosen, lengths, strict=True):
            assert row[: -(-length // 4)] == sequence.blocks[: -(-length // 4)]
        draws = self._columns.decode_draws(rows.draw_positions)
        assert draws.position.tolist() == lengths
        assert draws.seed.tolist() == [int(np.uint64(sequence.seed).astype(np.int64)) for sequence in chosen]
        self._columns.record_decoded(token_ids)


@settings(max_examples=100)
@given(data=st.data())
def test_any_order_of_changes_gives_the_rows_of_a_plain_model(data: st.DataObject) -> None:
    batch, device = InputBatch(LIMITS), DevicePart()
    sequences: dict[int, PlainSequence] = {}
    leave: list[int] = []
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        for slot in data.draw(st.permutations(list(sequences)), label="leave")[: data.draw(st.integers(0, 2))]:
            del sequences[slot]
            leave.append(slot)
        drawn = _draw_step(data, sequences, leave)
        if drawn is None:
            continue  # The next step carries the sequences that left.
        step, query_lens = drawn
        step_input = batch.apply(step)
        leave = []
        expect_rows(batch, step_input, sequences, query_lens)
        num_rows = len(step_input.row_slots)
        sampled = data.draw(st.lists(st.integers(0, 99), min_size=num_rows, max_size=num_rows))
        device.check_and_record(step_input, sequences, sampled)
        for slot, token_id in zip(step_input.row_slots.tolist(), sampled, strict=True):
            sequences[slot].tokens.append(token_id)
        assert batch.num_seqs == len(sequences)


def _draw_step(
    data: st.DataObject, sequences: dict[int, PlainSequence], leave: list[int]
) -> tuple[Step, dict[int, int]] | None:
    """A valid step, with the tokens each of its sequences computes, in order; updates `sequences`."""
    complete = [slot for slot, sequence in sequences.items() if not sequence.later]
    begun = [slot for slot, sequence in sequences.items() if sequence.later]
    free = [slot for slot in range(6) if slot not in sequences]
    chunks = [_draw_chunk(data, sequences, slot) for slot in data.draw(st.permutations(begun))[:2]]
    num_enters = data.draw(st.integers(0, min(1, len(free))), label="enters")
    enters = [_draw_enter(data, sequences, slot) for slot in data.draw(st.permutations(free))[:num_enters]]
    query_lens: dict[int, int] = {
        chunk.slot: chunk.num_tokens for chunk in (*chunks, *(enter.chunk for enter in enters))
    }
    # A sequence that fills its context gets no further row.
    rows = [slot for slot in complete if len(sequences[slot].tokens) <= 32]
    if not query_lens:
        return _draw_decode(data, sequences, rows, complete, leave) if rows else None
    if not rows or not data.draw(st.booleans(), label="mixed"):
        return prefill_step(*enters, chunks=chunks, leave=leave), query_lens
    decode, decode_lens = _draw_decode(data, sequences, rows, complete, leave)
    mixed = dataclasses.replace(decode, kind=StepKind.MIXED, **to_columns(enters, chunks))
    return mixed, decode_lens | query_lens


def _draw_enter(data: st.DataObject, sequences: dict[int, PlainSequence], slot: int) -> EnteringSequence:
    tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=31))
    num_cached = 4 * data.draw(st.integers(0, (len(tokens) - 1) // 4))
    num_blocks = data.draw(st.integers(-(-len(tokens) // 4), 8))
    blocks = data.draw(st.lists(st.integers(0, 39), min_size=num_blocks, max_size=num_blocks))
    seed = data.draw(st.integers(0, 2**64 - 1))
    sequences[slot] = PlainSequence(tokens[:num_cached], tokens[num_cached:], blocks, seed)
    chunk = _draw_chunk(data, sequences, slot)
    first = unpack(chunk.token_bytes)
    return make_enter(
        slot, first, blocks, num_cached_tokens=num_cached, num_later_tokens=chunk.num_later_tokens, seed=seed
    )


def _draw_chunk(data: st.DataObject, sequences: dict[int, PlainSequence], slot: int) -> PrefillChunk:
    sequence = sequences[slot]
    num_tokens = data.draw(st.integers(1, min(len(sequence.later), 16)), label="chunk")
    chunk, sequence.later = sequence.later[:num_tokens], sequence.later[num_tokens:]
    sequence.tokens += chunk
    return make_chunk(slot, chunk, len(sequence.later))


def _draw_decode(
    data: st.DataObject,
    sequences: dict[int, PlainSequence],
    rows: list[int],
    complete: list[int],
    leave: list[int],
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
    # Blocks of one slot keep their order, whatever is between them.
    append.sort(key=lambda pair: pair[0] % 2)
    decode_slots = data.draw(st.one_of(st.none(), st.permutations(rows)), label="decode_slots")
    if decode_slots is None and rows == complete:
        return decode_step(leave=leave, append=append), dict.fromkeys(rows, 1)
    decode_slots = decode_slots or rows
    return decode_step(leave=leave, append=append, rows=decode_slots), dict.fromkeys(decode_slots, 1)


def make_batch() -> InputBatch:
    """Slots 3 and 1, entered in that order, with five and two tokens, sampled once."""
    batch = InputBatch(LIMITS)
    batch.apply(prefill_step(make_enter(3, [1, 2, 3, 4, 5], [7, 8]), make_enter(1, [6, 7], [9])))
    return batch


GOOD = make_enter(0, [1, 2, 3, 4, 5], [10, 11])


def with_chunk(**changes: Any) -> EnteringSequence:
    return dataclasses.replace(GOOD, chunk=dataclasses.replace(GOOD.chunk, **changes))


def with_options(enter: EnteringSequence, **options: Any) -> EnteringSequence:
    return with_params(enter, options=SamplingOptions(**options))


CACHED = make_enter(0, [5], [10, 11], num_cached_tokens=4)
RESUMED = dataclasses.replace(GOOD, num_prompt_tokens=3)
BAD_ENTERS = {
    "slot above the limit": with_chunk(slot=6),
    "slot far above the limit": with_chunk(slot=2**32 - 1),
    "slot in use": with_chunk(slot=3),
    "no tokens": with_chunk(token_bytes=pack([])),
    "negative token": with_chunk(token_bytes=pack([1, -1])),
    "token at the logits width": with_chunk(token_bytes=pack([100])),
    "more later tokens than the table holds": with_chunk(num_later_tokens=4),
    "more later tokens than the context": with_chunk(num_later_tokens=2**32 - 1),
    "table too short": dataclasses.replace(GOOD, block_bytes=pack([10])),
    "table empty": dataclasses.replace(GOOD, block_bytes=pack([])),
    "block at the pool's size": dataclasses.replace(GOOD, block_bytes=pack([10, 40])),
    "negative block": dataclasses.replace(GOOD, block_bytes=pack([-1, 10])),
    "table longer than the context": dataclasses.replace(GOOD, block_bytes=pack(range(9))),
    "cached tokens not whole blocks": dataclasses.replace(GOOD, num_cached_tokens=3),
    "longer than the context": dataclasses.replace(GOOD, num_cached_tokens=28, block_bytes=pack(range(8))),
    "far longer than the context": dataclasses.replace(GOOD, num_cached_tokens=2**32 - 4),
    "no prompt": dataclasses.replace(GOOD, num_prompt_tokens=0),
    "prompt longer than the tokens": dataclasses.replace(GOOD, num_prompt_tokens=6),
    "temperature NaN": with_params(GOOD, temperature=float("nan")),
    "temperature infinite": with_params(GOOD, temperature=float("inf")),
    "temperature negative": with_params(GOOD, temperature=-0.5),
    "top_p 0": with_params(GOOD, top_p=0.0),
    "top_p NaN": with_params(GOOD, top_p=float("nan")),
    "top_k above the logits width": with_params(GOOD, top_k=101),
    "no token to generate": with_params(GOOD, max_tokens=0),
    "no token to generate after a completion": with_params(RESUMED, max_tokens=2),
    "max_tokens negative": with_params(GOOD, max_tokens=-5),
    "negative stop token": dataclasses.replace(GOOD, stop_token_ids=(-1,)),
    "stop token at the logits width": dataclasses.replace(GOOD, stop_token_ids=(2, 100)),
    "cached tokens that are not cached": dataclasses.replace(GOOD, cached_token_bytes=pack([1, 2, 3, 4])),
    "too few cached tokens": dataclasses.replace(CACHED, cached_token_bytes=pack([1, 2, 3])),
    "a cached token at the logits width": dataclasses.replace(CACHED, cached_token_bytes=pack([1, 2, 3, 100])),
    "penalties, and no cached tokens": with_options(CACHED, frequency_penalty=0.5),
    "prompt scored, and cached": with_options(CACHED, num_prompt_logprobs=1),
    "min_p above 1": with_options(GOOD, min_p=1.5),
    "repetition penalty 0": with_options(GOOD, repetition_penalty=0.0),
    "presence penalty NaN": with_options(GOOD, presence_penalty=float("nan")),
    "frequency penalty out of range": with_options(GOOD, frequency_penalty=-3.0),
    "bias of a token at the logits width": with_options(GOOD, logit_bias=((100, 1.0),)),
    "infinite bias": with_options(GOOD, logit_bias=((1, float("inf")),)),
    "bad word of no tokens": with_options(GOOD, bad_words=((),)),
    "bad word with a negative token": with_options(GOOD, bad_words=((1, -1),)),
    "min_tokens above the most": with_params(GOOD, max_tokens=3, options=SamplingOptions(min_tokens=4)),
    "too many log-probabilities": with_options(GOOD, num_logprobs=21),
    "a grammar where none is known": with_options(GOOD, grammar="start: /a/"),
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
    "decode: a sequence enters": dataclasses.replace(decode_step(), **to_columns([GOOD])),
    "prefill: no sequence enters": prefill_step(),
    "prefill: with decode_slots": dataclasses.replace(prefill_step(GOOD), decode_slots=column([0])),
    "chunk: of a complete sequence": prefill_step(chunks=[make_chunk(3, [1])]),
    "chunk: of no sequence": prefill_step(chunks=[make_chunk(0, [1])]),
    "chunk: slot above the limit": prefill_step(chunks=[make_chunk(6, [1])]),
    "mixed: without a prompt": mixed_step(),
    "mixed: no sequence to decode": dataclasses.replace(mixed_step(GOOD), leave_slots=column([3, 1])),
    "mixed: a sequence enters and is decoded": mixed_step(GOOD, rows=[0]),
    "prefill: the same slot twice": prefill_step(GOOD, GOOD),
    "prefill: more tokens than the budget": prefill_step(*(make_enter(slot, [1] * 24, range(6)) for slot in (0, 2, 4))),
}


@pytest.mark.parametrize("step", BAD_STEPS.values(), ids=BAD_STEPS.keys())
def test_a_step_that_does_not_fit_the_batch_is_refused(step: Step) -> None:
    with pytest.raises(StepMismatchError):
        make_batch().apply(step)


BAD_CHUNKS = {
    "longer than what is left": make_chunk(0, [1, 2, 3, 4], 0),
    "shorter, and later tokens are lost": make_chunk(0, [1], 1),
    "no tokens": make_chunk(0, [], 3),
    "negative token": make_chunk(0, [1, -1, 1]),
    "token at the logits width": make_chunk(0, [100], 2),
}
REPEATED_CHUNKS = {
    "twice": prefill_step(chunks=[make_chunk(0, [1, 2, 3]), make_chunk(0, [1, 2, 3])]),
    "one after the other": prefill_step(chunks=[make_chunk(0, [1], 2), make_chunk(0, [1, 1])]),
    "and decoded": mixed_step(chunks=[make_chunk(0, [1, 2, 3])], rows=[0]),
    "and entered": prefill_step(GOOD, chunks=[make_chunk(0, [1, 2, 3])]),
    "and left": prefill_step(chunks=[make_chunk(0, [1, 2, 3])], leave=[0]),
}


@pytest.mark.parametrize("chunk", BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
def test_a_chunk_that_does_not_fit_its_prompt_is_refused(chunk: PrefillChunk) -> None:
    batch = make_batch()
    batch.apply(prefill_step(make_enter(0, [1, 2], [10, 11], num_later_tokens=3)))
    with pytest.raises(StepMismatchError):
        batch.apply(prefill_step(chunks=[chunk]))


@pytest.mark.parametrize("step", REPEATED_CHUNKS.values(), ids=REPEATED_CHUNKS.keys())
def test_a_slot_is_in_one_place_of_a_step(step: Step) -> None:
    batch = make_batch()
    batch.apply(prefill_step(make_enter(0, [1, 2], [10, 11], num_later_tokens=3)))
    with pytest.raises(StepMismatchError):
        batch.apply(step)


def test_a_sequence_is_not_decoded_before_its_prompt_is_complete() -> None:
    batch = make_batch()
    step_input = batch.apply(prefill_step(make_enter(0, [1, 2], [10, 11], num_later_tokens=3)))
    assert step_input.row_slots.tolist() == []
    assert batch.apply(decode_step()).row_slots.tolist() == [3, 1]
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step(rows=[0]))


def test_a_decode_with_a_full_table_is_refused_until_it_gets_a_block() -> None:
    batch = InputBatch(LIMITS)
    step_input = batch.apply(prefill_step(make_enter(0, [1, 2, 3, 4], [5])))
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step())
    step_input = batch.apply(decode_step(append=[(0, 17)]))
    assert step_input.arrays["slot_mapping"].tolist() == [17 * 4]


def test_a_sequence_that_fills_the_context_is_computed_but_not_continued() -> None:
    batch = InputBatch(LIMITS)
    step_input = batch.apply(prefill_step(make_enter(0, [1] * 32, range(8))))
    assert step_input.arrays["positions"].tolist() == list(range(32))
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step())


def test_more_rows_than_the_token_budget_are_refused() -> None:
    batch = InputBatch(dataclasses.replace(LIMITS, max_num_batched_tokens=1))
    for slot in (0, 1):
        batch.apply(prefill_step(make_enter(slot, [1], [slot])))
    with pytest.raises(StepMismatchError):
        batch.apply(decode_step())


def test_a_slot_can_be_entered_again_in_the_step_in_which_it_is_left() -> None:
    batch = make_batch()
    step_input = batch.apply(prefill_step(make_enter(3, [8], [20]), leave=[3]))
    assert (step_input.arrays["token_ids"].tolist(), step_input.arrays["block_tables"].tolist()) == ([8], [[20]])
    decoded = batch.apply(decode_step())
    assert (decoded.row_slots.tolist(), decoded.arrays["positions"].tolist()) == ([1, 3], [2, 1])


def test_decode_slots_apply_to_one_step_only() -> None:
    batch = make_batch()
    assert batch.apply(decode_step(rows=[1])).row_slots.tolist() == [1]
    assert batch.apply(decode_step()).row_slots.tolist() == [3, 1]


def test_arrays_of_a_step_do_not_change_with_the_next_one() -> None:
    batch = make_batch()
    first = batch.apply(decode_step())
    arrays = (
        first.arrays["token_ids"],
        first.arrays["block_tables"],
        first.context_lens,
        first.row_slots,
        first.row_positions,
    )
    copies = [array.copy() for array in arrays]
    batch.apply(prefill_step(make_enter(3, [8], [20]), leave=[3]))
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def set_table(tables: BlockTables, slot: int, block_ids: npt.NDArray[np.int32]) -> None:
    tables.append(np.full(len(block_ids), slot), block_ids)


def test_block_tables_take_memory_for_the_longest_table_not_for_the_context() -> None:
    tables = BlockTables(num_slots=512, num_pool_blocks=131072, max_blocks_per_sequence=131072)
    assert tables.num_bytes < 100_000
    set_table(tables, 0, np.arange(1000, dtype=np.int32))
    assert tables.num_bytes < 3_000_000
    np.testing.assert_array_equal(tables.ids[0, :1000], np.arange(1000))


def test_a_slots_previous_table_leaves_no_entries() -> None:
    tables = BlockTables(num_slots=2, num_pool_blocks=50, max_blocks_per_sequence=40)
    set_table(tables, 1, np.arange(1, 31, dtype=np.int32))
    tables.clear(column([1]))
    set_table(tables, 1, column([5]))
    assert tables.ids[1, :30].tolist() == [5] + [0] * 29


def test_cached_tokens_are_required_only_where_they_are_needed() -> None:
    sent = dataclasses.replace(CACHED, cached_token_bytes=pack([1, 2, 3, 4]))
    penalized = with_options(sent, frequency_penalty=0.5)
    counted = with_options(CACHED, min_tokens=2)
    for enter in (CACHED, sent, penalized, counted):
        batch = InputBatch(LIMITS)
        assert batch.apply(prefill_step(enter)).arrays["positions"].tolist() == [4]


def test_options_apply_only_to_the_rows_of_their_sequences() -> None:
    batch = make_batch()
    with_bias = with_options(make_enter(0, [1, 2], [10, 11], num_later_tokens=1), logit_bias=((5, 1.0),))
    step_input = batch.apply(mixed_step(with_bias))
    # Its prompt is not complete: it has no row.
    assert batch.sampling(step_input).states == {}
    step_input = batch.apply(mixed_step(with_options(make_enter(2, [3], [12]), min_p=0.5), chunks=[make_chunk(0, [4])]))
    assert step_input.row_slots.tolist() == [3, 1, 0, 2]
    states = batch.sampling(step_input).states
    assert {row: state.options.min_p for row, state in states.items()} == {2: 0.0, 3: 0.5}
    assert list(batch.sampling(batch.apply(decode_step(rows=[2, 3]))).states) == [0]
    # The next sequence in the slot has none.
    step_input = batch.apply(prefill_step(make_enter(0, [1], [10]), leave=[0]))
    assert batch.sampling(step_input).states == {}


def test_a_state_knows_every_token_of_its_sequence_before_the_first_is_drawn() -> None:
    seen: list[int] = []

    class RecordingMatcher:
        has_failed = False

        def mask(self) -> npt.NDArray[np.bool_]:
            return np.ones(100, np.bool_)

        def advance(self, token_id: int) -> None:
            seen.append(token_id)

        def prepare(self) -> None:
            pass

    grammars: list[str] = []

    def make_matcher(grammar: str) -> RecordingMatcher:
        grammars.append(grammar)
        return RecordingMatcher()

    batch = InputBatch(LIMITS, make_matcher=make_matcher)
    enter = make_enter(0, [5, 6], range(4), num_cached_tokens=4, num_later_tokens=2, cached_token_ids=[1, 2, 3, 4])
    enter = dataclasses.replace(with_options(enter, grammar="start: /a/"), num_prompt_tokens=3)
    batch.apply(prefill_step(enter))
    batch.apply(prefill_step(chunks=[make_chunk(0, [7, 8])]))
    # A matcher receives the completion, which begins after the third token.
    assert (seen, grammars) == ([4, 5, 6, 7, 8], ["start: /a/"])


def test_each_choice_has_its_own_noise() -> None:
    batch = InputBatch(LIMITS)
    enters = [dataclasses.replace(make_enter(slot, [1], [slot]), choice=choice) for slot, choice in ((0, 3), (2, 0))]
    assert batch.sampling(batch.apply(prefill_step(*enters))).choice.tolist() == [3, 0]
