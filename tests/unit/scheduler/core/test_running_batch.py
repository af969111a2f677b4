"""Which sequences hold slots and blocks: entering, leaving while steps are in flight, and the loss of a worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.scheduler.core.batch.sequence import Sequence, SequenceStatus
from services.scheduler.core.batch.step import StepPace
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.planning.assemble import assemble
from services.scheduler.core.planning.decode import Decodes
from services.scheduler.core.planning.prefill import Prefill
from services.scheduler.core.running_batch import RunningBatch
from shared.step.step import StepKind
from tests.support.scheduler.core import completion_of, make_sequence, prompt_of

BLOCK_SIZE = 4


def make_batch(*, num_slots: int = 4, num_blocks: int = 16) -> RunningBatch:
    return RunningBatch(num_slots, BlockManager(num_blocks, BLOCK_SIZE))


def enter(batch: RunningBatch, *seqs: Sequence) -> list[int]:
    """Give sequences blocks and slots; returns the slots."""
    for seq in seqs:
        assert batch.blocks.try_allocate(seq, batch.blocks.find_prefix(seq))
    slots = [batch.enter(seq, []) for seq in seqs]
    batch.check_integrity()
    return slots


def send(batch: RunningBatch, *seqs: Sequence, partial: tuple[Sequence, ...] = (), now: float = 0.0) -> int:
    """Commit a step with one row for each of `seqs`, and a chunk of each of `partial`; returns its id."""
    rows = np.array([seq.slot for seq in seqs], np.intp)
    step = assemble(batch.take_leave_slots(), Decodes(rows), Prefill())
    partial_slots = [seq.slot for seq in partial if seq.slot is not None]
    step_id = batch.commit(replace(step, partial_slots=partial_slots), now)
    batch.check_integrity()
    return step_id


def append(batch: RunningBatch, seq: Sequence, *token_ids: int) -> None:
    """Give a sequence tokens of steps in flight, which it stores later."""
    for token_id in token_ids:
        slots = np.array([seq.slot], np.intp)
        batch.slots.append(slots, batch.slots.num_tokens[slots], np.array([token_id], np.int32))


def num_used_blocks(batch: RunningBatch) -> int:
    return batch.blocks.num_blocks - batch.blocks.num_free_blocks


# Entering and leaving


def test_sequences_run_in_order_of_entry_whatever_their_slots() -> None:
    batch = make_batch()
    first, second, third, fourth = (make_sequence(handle, 5) for handle in range(1, 5))
    assert enter(batch, first, second, third) == [0, 1, 2]
    assert first.status is SequenceStatus.RUNNING
    batch.drop(second)
    assert batch.order.tolist() == [0, 2]
    # The newcomer takes the slot in the middle, and is last in order.
    assert enter(batch, fourth) == [1]
    assert batch.order.tolist() == [0, 2, 1]
    assert batch.sequences() == [first, third, fourth]


def test_a_slot_that_was_just_left_can_be_taken_before_anyone_looks_at_the_order() -> None:
    batch = make_batch(num_slots=2)
    first, second, third = (make_sequence(handle, 5) for handle in range(1, 4))
    enter(batch, first, second)
    batch.drop(first)
    enter(batch, third)
    assert (batch.order.tolist(), batch.sequences()) == ([1, 0], [second, third])


def test_a_sequence_that_no_step_names_frees_its_slot_and_blocks_at_once() -> None:
    batch = make_batch()
    seq = make_sequence(1, 5)
    enter(batch, seq)
    assert (num_used_blocks(batch), batch.slots.num_free_slots) == (2, 3)
    batch.drop(seq)
    assert (num_used_blocks(batch), batch.slots.num_free_slots) == (0, 4)
    assert (seq.slot, seq.block_table.tolist(), seq.is_retiring) == (None, [], False)
    batch.check_integrity()


def test_a_slot_leaves_the_workers_batch_once() -> None:
    batch = make_batch()
    first, second = make_sequence(1, 5), make_sequence(2, 5)
    enter(batch, first, second)
    batch.drop(second)
    batch.drop(first)
    assert batch.take_leave_slots() == [1, 0]
    assert batch.take_leave_slots() == []


def test_a_sequence_whose_prompt_has_begun_has_no_decode_row_until_it_is_dropped() -> None:
    batch = make_batch()
    begun, complete = make_sequence(1, 9), make_sequence(2, 5)
    begun.num_unsent_tokens = 3
    enter(batch, begun, complete)
    assert (batch.begun, batch.order.tolist(), batch.decode_rows.tolist()) == ([begun], [0, 1], [1])
    batch.drop(begun)
    assert (batch.begun, batch.decode_rows.tolist()) == ([], [1])


def test_progress_counts_completion_tokens_of_running_sequences_and_the_most_they_may_have() -> None:
    batch = make_batch()
    first, second, third = (make_sequence(handle, 5, max_tokens=10 * handle) for handle in range(1, 4))
    enter(batch, first, second, third)
    append(batch, first, 501, 502)
    append(batch, second, 601)
    batch.drop(third)
    assert batch.progress() == (3, 30)


# Steps in flight


def test_steps_are_numbered_and_return_in_order() -> None:
    batch = make_batch()
    seq = make_sequence(1, 5)
    enter(batch, seq)
    assert [send(batch, seq, now=2.0), send(batch, seq, now=3.0)] == [1, 2]
    assert batch.last_returned_step_id == 0
    record = batch.pop_record()
    assert (record.step_id, record.kind, record.num_tokens, record.sent_at) == (1, StepKind.DECODE, 1, 2.0)
    assert batch.last_returned_step_id == 1
    assert [record.step_id for record in batch.in_flight] == [2]


def test_a_step_is_as_slow_as_the_slowest_coupled_rank_makes_it() -> None:
    batch = make_batch()
    seq = make_sequence(1, 5)
    enter(batch, seq)
    step = assemble([], Decodes(batch.order), Prefill())
    batch.commit(step, 0.0, StepPace(StepKind.PREFILL, 80))
    assert (batch.in_flight[0].kind, batch.in_flight[0].num_tokens) == (StepKind.PREFILL, 80)


def test_each_row_in_flight_is_a_placeholder() -> None:
    batch = make_batch()
    first, second = make_sequence(1, 5), make_sequence(2, 7)
    enter(batch, first, second)
    send(batch, first, second)
    send(batch, second)
    assert batch.slots.num_planned[:2].tolist() == [6, 9]
    assert batch.slots.num_tokens[:2].tolist() == [5, 7]


def test_a_sequence_retires_with_the_row_that_is_certain_to_complete_it() -> None:
    batch = make_batch()
    short, long = make_sequence(1, 5, max_tokens=2), make_sequence(2, 5, max_tokens=3)
    enter(batch, short, long)
    send(batch, short, long)
    assert batch.sequences() == [short, long]
    send(batch, short, long)
    assert (batch.sequences(), batch.retiring()) == ([long], [short])
    assert short.is_retiring
    assert batch.take_leave_slots() == [0]


def test_the_last_step_that_names_a_sequence_frees_its_slot_and_blocks() -> None:
    batch = make_batch()
    first, second = make_sequence(1, 5), make_sequence(2, 5)
    enter(batch, first, second)
    for rows in ([first, second], [first, second], [second]):
        send(batch, *rows)
    batch.drop(first)
    assert [record.retiring for record in batch.in_flight] == [[], [first], []]
    # It keeps what it holds, as the worker still writes there.
    assert (first.slot, len(first.block_table), num_used_blocks(batch)) == (0, 2, 4)
    assert batch.pop_record().retiring == []
    batch.release(batch.pop_record().retiring)
    assert (first.slot, first.is_retiring, num_used_blocks(batch)) == (None, False, 2)
    assert batch.slots.num_free_slots == 3


def test_a_chunk_in_flight_keeps_a_sequences_slot_as_a_row_does() -> None:
    batch = make_batch()
    begun = make_sequence(1, 9)
    begun.num_unsent_tokens = 3
    enter(batch, begun)
    send(batch, partial=(begun,))
    batch.drop(begun)
    assert (batch.retiring(), begun.slot, num_used_blocks(batch)) == ([begun], 0, 3)


def test_the_steps_in_flight_free_the_blocks_that_only_retiring_sequences_hold() -> None:
    batch = make_batch()
    first = make_sequence(1, 5)
    enter(batch, first)
    batch.blocks.publish(first, 4)
    second = make_sequence(2, [*prompt_of(first), 7, 8, 9, 10])
    enter(batch, second)
    assert second.block_table[0] == first.block_table[0]
    send(batch, first, second)
    assert batch.num_coming_blocks() == 0
    batch.drop(second)
    # Its last two blocks; the first one stays with its neighbour.
    assert batch.num_coming_blocks() == 2
    batch.drop(first)
    assert batch.num_coming_blocks() == 3


def test_the_requests_in_flight_are_the_unfinished_ones_each_once_in_row_order() -> None:
    batch = make_batch()
    first, second, third, idle = (make_sequence(handle, 5) for handle in range(1, 5))
    enter(batch, first, second, third, idle)
    send(batch, second, first)
    send(batch, second, partial=(third,))
    assert batch.in_flight_keys() == [second.key, first.key, third.key]
    second.left_at = 1.0
    assert batch.in_flight_keys() == [first.key, third.key]
    assert batch.sequences_in(batch.in_flight[1]) == [second, third]


# Tokens and the prefix cache


def test_storing_tokens_publishes_the_blocks_before_the_newest_token() -> None:
    batch = make_batch()
    seq = make_sequence(1, 6)
    enter(batch, seq)
    same = make_sequence(2, [*prompt_of(seq), 501, 502, 503])
    append(batch, seq, 501, 502)
    assert completion_of(seq) == []
    batch.store(seq)
    assert completion_of(seq) == [501, 502]
    # The newest of the 8 tokens is computed by the next step.
    assert batch.blocks.num_cached_tokens(same) == 4
    append(batch, seq, 503)
    batch.store(seq)
    assert batch.blocks.num_cached_tokens(same) == 8


def test_storing_a_begun_prompt_publishes_what_was_sent() -> None:
    batch = make_batch()
    for num_unsent, num_cached in ((4, 8), (5, 4)):
        seq = make_sequence(num_unsent, 12)
        seq.num_unsent_tokens = num_unsent
        enter(batch, seq)
        batch.store(seq)
        assert batch.blocks.num_cached_tokens(make_sequence(9, [*prompt_of(seq), 1])) == num_cached


# Loss of the worker


def test_the_unfinished_sequences_of_a_lost_worker_keep_their_tokens_and_nothing_else() -> None:
    batch = make_batch(num_slots=8)
    retiring, ended, first, second, begun = (make_sequence(handle, 5) for handle in range(1, 6))
    begun.num_unsent_tokens = 2
    enter(batch, retiring, ended, first, second, begun)
    send(batch, retiring, ended, first)
    append(batch, first, 501, 502)
    append(batch, retiring, 601)
    batch.drop(retiring)
    batch.drop(ended)
    ended.status = SequenceStatus.FINISHED
    assert batch.void() == [first, second, begun, retiring]
    assert [completion_of(seq) for seq in (first, second, retiring)] == [[501, 502], [], [601]]
    for seq in (first, second, begun, retiring):
        assert (seq.status, seq.slot, seq.block_table.tolist()) == (SequenceStatus.WAITING, None, [])
        assert (seq.num_unsent_tokens, seq.is_retiring) == (0, False)
