"""Which sequences a step decodes, which blocks it opens for them, and what happens when none are free."""

from __future__ import annotations

import pytest

from services.scheduler.core.batch.sequence import SequenceStatus
from services.scheduler.core.planning.decode import Decodes
from services.scheduler.core.policy import RetractionPolicy, SchedulerPolicy
from tests.support.scheduler.core import Parts, completion_of, make_sequence
from tests.support.scheduler.engine_driver import worker_facts


def make_drafting(*, num_blocks: int = 64, num_draft_tokens: int = 3) -> Parts:
    """Parts whose worker drafts."""
    return Parts(facts=worker_facts(num_blocks=num_blocks, num_draft_tokens=num_draft_tokens))


def shape_of(decodes: Decodes) -> tuple[list[int], list[int], bool]:
    """The rows, the rows that get a block (once for each), and whether others sit out."""
    return decodes.rows.tolist(), decodes.append_slots.tolist(), decodes.skips_rows


# With enough blocks


def test_all_running_sequences_are_decoded_in_batch_order() -> None:
    parts = Parts()
    first, second, third = (make_sequence(handle, 5) for handle in range(1, 4))
    parts.start(first, second, third)
    parts.running.drop(first)
    parts.send_prefill(make_sequence(4, 5))
    assert shape_of(parts.plan_decode()) == ([1, 2, 0], [], False)


def test_a_prompt_that_is_sent_only_in_part_is_not_decoded() -> None:
    parts = Parts(SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=8, enable_mixed_steps=True))
    parts.add(make_sequence(1, 5), make_sequence(2, 5))
    parts.send(Decodes(), parts.plan_prefill(budget=8))
    assert shape_of(parts.plan_decode()) == ([0], [], False)


def test_a_block_opens_for_the_token_that_does_not_fit() -> None:
    parts = Parts()
    seqs = [make_sequence(handle, num_tokens) for handle, num_tokens in ((1, 15), (2, 16), (3, 17))]
    # The prefill's tokens, which are in flight, are the 16th, 17th and 18th; the last has two blocks already.
    parts.send_prefill(*seqs)
    decodes = parts.plan_decode()
    assert (shape_of(decodes), decodes.append_block_ids) == (([0, 1, 2], [1], False), [4])
    assert [seq.block_table.tolist() for seq in seqs] == [[0], [1, 4], [2, 3]]
    assert parts.running.slots.num_blocks[:3].tolist() == [1, 2, 2]
    parts.send(decodes)
    assert shape_of(parts.plan_decode()) == ([0, 1, 2], [0], False)


def test_small_blocks_open_for_16_tokens_at_a_time() -> None:
    parts = Parts(block_size=4)
    first, second = make_sequence(1, 4), make_sequence(2, 4)
    parts.send_prefill(first, second)
    decodes = parts.send_decode()
    assert shape_of(decodes) == ([0, 1], [0] * 4 + [1] * 4, False)
    assert decodes.append_block_ids == [2, 3, 4, 5, 6, 7, 8, 9]
    assert [seq.block_table.tolist() for seq in (first, second)] == [[0, 2, 3, 4, 5], [1, 6, 7, 8, 9]]
    openings = [parts.send_decode().append_slots.tolist() for _ in range(16)]
    assert openings == [[]] * 15 + [[0] * 4 + [1] * 4]


def test_no_small_block_opens_beyond_the_last_token() -> None:
    parts = Parts(block_size=4)
    parts.send_prefill(make_sequence(1, 4, max_tokens=5), make_sequence(2, 4, max_tokens=4))
    assert shape_of(parts.plan_decode()) == ([0, 1], [0, 0, 1], False)


# With drafts


@pytest.mark.parametrize(("num_prompt_tokens", "opens"), [(9, []), (10, [0])])
def test_a_row_has_room_for_the_most_tokens_in_flight_and_its_next_drafts(
    num_prompt_tokens: int, opens: list[int]
) -> None:
    parts = make_drafting()
    # Up to 4 tokens are in flight, and the row stores those and up to 3 drafts.
    parts.send_prefill(make_sequence(1, num_prompt_tokens))
    assert shape_of(parts.plan_decode()) == ([0], opens, False)


def test_no_block_opens_for_drafts_beyond_the_last_token() -> None:
    parts = make_drafting()
    parts.send_prefill(make_sequence(1, 10, max_tokens=6), make_sequence(2, 10, max_tokens=7))
    assert shape_of(parts.plan_decode()) == ([0, 1], [1], False)


def test_as_many_blocks_open_as_the_drafts_need() -> None:
    parts = Parts(block_size=1, facts=worker_facts(num_draft_tokens=20))
    parts.send_prefill(make_sequence(1, 1))
    # 1 token known, at most 21 in flight, 20 drafts.
    assert shape_of(parts.plan_decode()) == ([0], [0] * 41, False)
    parts = Parts(block_size=16, facts=worker_facts(num_draft_tokens=20))
    parts.send_prefill(make_sequence(1, 1))
    assert shape_of(parts.plan_decode()) == ([0], [0] * 2, False)


def test_a_row_without_a_free_block_for_its_drafts_takes_part_all_the_same() -> None:
    parts = make_drafting(num_blocks=1)
    parts.send_prefill(make_sequence(1, 13))
    parts.give(501)
    # The 14 known tokens fit in the block; the worker drafts only two.
    assert shape_of(parts.plan_decode()) == ([0], [], False)


def test_a_row_that_may_still_need_no_block_sits_out_and_preempts_none() -> None:
    parts = make_drafting(num_blocks=2)
    parts.send_prefill(make_sequence(1, 15), make_sequence(2, 5))
    # Its step in flight returns 1 to 4 tokens; with one, its block is just full.
    assert shape_of(parts.plan_decode()) == ([1], [], True)
    assert parts.counters.num_preemptions == 0
    parts.give(501, 502)
    assert shape_of(parts.plan_decode()) == ([0, 1], [], False)


def test_short_of_blocks_a_row_that_certainly_needs_one_preempts_another() -> None:
    parts = make_drafting(num_blocks=2)
    parts.send_prefill(make_sequence(1, 16), make_sequence(2, 5))
    parts.give(501, 502)
    assert shape_of(parts.plan_decode()) == ([0], [0], False)
    assert parts.counters.num_preemptions == 1


# Short of blocks


def test_when_no_block_is_free_or_coming_the_last_sequence_gives_its_blocks() -> None:
    parts = Parts(num_blocks=3)
    first, second, third = (make_sequence(handle, num) for handle, num in ((1, 16), (2, 5), (3, 5)))
    parts.send_prefill(first, second, third)
    parts.give(501, 502, 503)
    decodes = parts.plan_decode()
    assert shape_of(decodes) == ([0, 1], [0], False)
    assert decodes.append_block_ids == [2]
    assert (first.block_table.tolist(), parts.running.slots.num_blocks[0]) == ([0, 2], 2)
    assert (list(parts.waiting), third.status) == ([third], SequenceStatus.WAITING)
    assert (completion_of(third), third.block_table.tolist()) == ([503], [])
    assert parts.counters.num_preemptions == 1


def test_the_last_sequence_preempts_itself() -> None:
    parts = Parts(num_blocks=2)
    first, last = make_sequence(1, 5), make_sequence(2, 16)
    parts.send_prefill(first, last)
    parts.give(501, 502)
    assert shape_of(parts.plan_decode()) == ([0], [], False)
    assert list(parts.waiting) == [last]


def test_a_row_preempted_for_an_earlier_one_takes_no_block_itself() -> None:
    parts = Parts(num_blocks=2)
    first, last = make_sequence(1, 16), make_sequence(2, 16)
    parts.send_prefill(first, last)
    parts.give(501, 502)
    assert shape_of(parts.plan_decode()) == ([0], [0], False)
    assert list(parts.waiting) == [last]


def test_a_row_preempted_for_an_earlier_one_preempts_no_other() -> None:
    parts = Parts(num_blocks=3)
    first, second, last = make_sequence(1, 16), make_sequence(2, 5), make_sequence(3, 16)
    parts.send_prefill(first, second, last)
    # The block of the last one comes with its step in flight, and the first waits for it.
    assert shape_of(parts.plan_decode()) == ([1], [], True)
    assert (parts.running.sequences(), parts.preemption.num_parked) == ([first, second], 1)


def test_a_row_sits_out_while_a_step_in_flight_frees_a_block() -> None:
    parts = Parts(num_blocks=3)
    first, second, ending = make_sequence(1, 16), make_sequence(2, 5), make_sequence(3, 5, max_tokens=2)
    parts.send_prefill(first, second, ending)
    parts.give(501, 502, 503)
    # The last row of the third is in flight.
    parts.send(Decodes(parts.running.order[1:]))
    assert shape_of(parts.plan_decode()) == ([1], [], True)
    parts.give(602, 603)
    assert shape_of(parts.plan_decode()) == ([0, 1], [0], False)
    assert parts.counters.num_preemptions == 0


def test_each_coming_block_keeps_one_row_waiting() -> None:
    parts = Parts(num_blocks=4)
    first, second, ending, last = (make_sequence(handle, num) for handle, num in ((1, 16), (2, 16), (3, 5), (4, 5)))
    parts.send_prefill(first, second, ending, last)
    parts.endings.abort(ending, 0.0)
    # One block is coming, for the first row; the second preempts the last sequence.
    assert shape_of(parts.plan_decode()) == ([], [], True)
    assert (parts.running.sequences(), parts.preemption.num_parked) == ([first, second], 1)
    assert (last.status, list(parts.waiting)) == (SequenceStatus.WAITING, [])


def test_rows_that_need_no_block_go_on_while_others_sit_out() -> None:
    parts = Parts(num_blocks=3)
    first, second, ending = make_sequence(1, 5), make_sequence(2, 16), make_sequence(3, 5)
    parts.send_prefill(first, second, ending)
    parts.endings.abort(ending, 0.0)
    assert shape_of(parts.plan_decode()) == ([0], [], True)


def test_a_row_that_got_a_block_and_is_preempted_for_a_later_one_leaves_the_step() -> None:
    policy = SchedulerPolicy(max_num_seqs=8, retraction_policy=RetractionPolicy.FEWEST_OUTPUT_TOKENS)
    parts = Parts(policy, num_blocks=3)
    first, second = make_sequence(1, 16), make_sequence(2, 15)
    parts.send_prefill(first, second)
    parts.give(501, 502)
    parts.send(Decodes(parts.running.order[1:]))
    parts.give(602)
    # One block is free, and goes to the first row, which has generated less than the second.
    decodes = parts.plan_decode()
    assert (shape_of(decodes), decodes.append_block_ids) == (([1], [1], False), [2])
    assert (list(parts.waiting), second.block_table.tolist()) == ([first], [1, 2])


def test_a_row_that_sits_out_and_is_preempted_for_a_later_one_no_longer_sits_out() -> None:
    policy = SchedulerPolicy(max_num_seqs=8, retraction_policy=RetractionPolicy.FEWEST_OUTPUT_TOKENS)
    parts = Parts(policy, num_blocks=3)
    first, second, ending = make_sequence(1, 16), make_sequence(2, 15), make_sequence(3, 5)
    parts.send_prefill(first, second, ending)
    parts.give(501, 502, 503)
    parts.send(Decodes(parts.running.order[1:]))
    parts.give(602, 603)
    parts.send(Decodes(parts.running.order[2:]))
    parts.endings.abort(ending, 0.0)
    decodes = parts.plan_decode()
    assert (shape_of(decodes), list(parts.waiting)) == (([1], [1], False), [first])


def test_the_block_of_a_row_that_preempted_itself_comes_for_a_later_row() -> None:
    policy = SchedulerPolicy(max_num_seqs=8, retraction_policy=RetractionPolicy.FEWEST_OUTPUT_TOKENS)
    parts = Parts(policy, num_blocks=3)
    first, second, third = make_sequence(1, 15), make_sequence(2, 13), make_sequence(3, 5)
    parts.start(first, second, third)
    for _ in range(3):
        parts.send(Decodes(parts.running.order[1:]))
        parts.give(602, 603)
    parts.send(Decodes(parts.running.order[:1]))
    # The first and the second need a block, and the first has the least output; its step is in flight.
    assert shape_of(parts.plan_decode()) == ([2], [], True)
    assert (parts.running.sequences(), parts.preemption.num_parked) == ([second, third], 1)


def test_short_of_blocks_a_row_opens_one_small_block_instead_of_several() -> None:
    parts = Parts(num_blocks=4, block_size=4)
    seqs = [make_sequence(1, 4), make_sequence(2, 4)]
    parts.send_prefill(*seqs)
    decodes = parts.plan_decode()
    assert (shape_of(decodes), decodes.append_block_ids) == (([0, 1], [0, 1], False), [2, 3])
    assert parts.running.slots.num_blocks[:2].tolist() == [2, 2]
