"""What a rank's next step is, how several are in flight, and who may enter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.batch.sequence import Finish, FinishReason, Priority, SequenceStatus
from services.scheduler.core.batch.step import ScheduledBatch, StepCounts, StepPace
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.request.sampling_params import SamplingOptions
from shared.step.step import StepKind
from tests.support.scheduler.core import (
    add,
    completion_of,
    give,
    make_scheduler,
    make_sequence,
    prompt_of,
    result_of,
    rows_for,
    send,
)
from tests.support.scheduler.engine_driver import EOS, worker_facts

PREFILL, DECODE, MIXED = StepKind.PREFILL, StepKind.DECODE, StepKind.MIXED
MIXED_STEPS = SchedulerPolicy(max_num_batched_tokens=8, enable_mixed_steps=True)


def shape_of(batch: ScheduledBatch) -> tuple[StepKind, int, list[int], list[int]]:
    """The kind, the tokens computed, the rows, and those of them that decode."""
    return batch.kind, batch.num_tokens, batch.row_slots.tolist(), batch.decode_slots.tolist()


# One step at a time


def test_an_idle_scheduler_has_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert (scheduler.schedule(0.0), scheduler.is_empty, scheduler.oldest_in_flight) == (None, True, None)
    assert scheduler.num_steps == StepCounts()


def test_a_prompt_is_computed_and_then_one_token_per_step() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, 5, max_tokens=3)
    scheduler.add(seq, 0.0)
    assert (scheduler.num_waiting, scheduler.num_waiting_tokens, scheduler.is_empty) == (1, 5, False)
    assert shape_of(send(scheduler)) == (PREFILL, 5, [0], [])
    assert rows_for(give(scheduler, 501)) == [(1, 0, [501])]
    assert shape_of(send(scheduler)) == (DECODE, 1, [0], [0])
    assert rows_for(give(scheduler, 502)) == [(1, 1, [502])]
    assert shape_of(send(scheduler)) == (DECODE, 1, [0], [0])
    assert (scheduler.num_running, scheduler.is_empty) == (0, False)
    assert rows_for(give(scheduler, 503)) == [(1, 2, [503])]
    assert (seq.status, completion_of(seq)) == (SequenceStatus.FINISHED, [501, 502, 503])
    assert (scheduler.is_empty, scheduler.block_counts.free) == (True, 64)
    assert scheduler.num_steps == StepCounts(prefill=1, decode=2)


def test_prompts_go_first_and_their_step_decodes_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(1, 5))
    send(scheduler)
    give(scheduler, 501)
    add(scheduler, make_sequence(2, 6), make_sequence(3, 7))
    assert shape_of(send(scheduler)) == (PREFILL, 13, [1, 2], [])
    give(scheduler, 502, 503)
    assert shape_of(send(scheduler)) == (DECODE, 3, [0, 1, 2], [0, 1, 2])


def test_the_worker_learns_with_the_next_step_which_slots_were_left() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(1, 5), make_sequence(2, 5)
    add(scheduler, first, second)
    assert send(scheduler).leave_slots == []
    give(scheduler, 501, 502)
    scheduler.abort(first, 0.0)
    batch = send(scheduler)
    assert (batch.leave_slots, batch.row_slots.tolist()) == ([0], [1])
    give(scheduler, 602)
    assert send(scheduler).leave_slots == []


def test_a_decode_step_carries_only_the_blocks_it_opens() -> None:
    scheduler = make_scheduler()
    seqs = [make_sequence(handle, num_tokens) for handle, num_tokens in ((1, 15), (2, 16), (3, 17))]
    add(scheduler, *seqs)
    send(scheduler)
    batch = send(scheduler)
    assert (batch.enters, batch.chunks, batch.leave_slots, batch.skips_rows) == ([], [], [], False)
    assert (batch.append_slots.tolist(), batch.append_block_ids) == ([1], [seqs[1].block_table[-1]])


def test_a_sequence_ends_with_an_eos_token_of_the_worker() -> None:
    scheduler = make_scheduler(facts=replace(worker_facts(), eos_token_ids=(3,)))
    seq = make_sequence(1, 5)
    add(scheduler, seq)
    for token_id in (EOS, 3):
        assert seq.finish is None
        send(scheduler)
        give(scheduler, token_id)
    assert (seq.finish, completion_of(seq)) == (Finish(FinishReason.EOS, 3), [EOS, 3])


def test_a_prompt_above_the_budget_takes_several_steps_before_anything_is_decoded() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_batched_tokens=8))
    add(scheduler, make_sequence(1, 5))
    send(scheduler)
    give(scheduler, 501)
    add(scheduler, make_sequence(2, 12))
    batch = send(scheduler)
    assert (shape_of(batch), batch.partial_slots, scheduler.is_prefilling) == ((PREFILL, 8, [], []), [1], True)
    give(scheduler)
    assert (shape_of(send(scheduler)), scheduler.is_prefilling) == ((PREFILL, 4, [1], []), False)
    give(scheduler, 502)
    assert shape_of(send(scheduler)) == (DECODE, 2, [0, 1], [0, 1])


# Mixed steps


def test_in_mixed_steps_prompts_get_what_decodes_leave_of_the_budget() -> None:
    scheduler = make_scheduler(MIXED_STEPS)
    add(scheduler, make_sequence(1, 3), make_sequence(2, 4))
    send(scheduler)
    give(scheduler, 501, 502)
    add(scheduler, make_sequence(3, 10))
    batch = send(scheduler)
    assert (shape_of(batch), batch.partial_slots) == ((MIXED, 8, [0, 1], [0, 1]), [2])
    give(scheduler, 601, 602)
    # The row of the completed prompt follows those of the decodes.
    assert shape_of(send(scheduler)) == (MIXED, 6, [0, 1, 2], [0, 1])
    assert scheduler.num_steps == StepCounts(prefill=1, mixed=2)


def test_a_begun_prompt_continues_when_no_sequence_may_enter() -> None:
    scheduler = make_scheduler(MIXED_STEPS)
    add(scheduler, make_sequence(1, 10), make_sequence(2, 3))
    send(scheduler)
    batch = scheduler.plan(0.0, may_prefill=False)
    assert batch is not None
    assert (shape_of(batch), batch.enters) == ((PREFILL, 2, [0], []), [])
    scheduler.commit(batch, 0.0)
    batch = scheduler.plan(0.0, may_prefill=False)
    assert batch is not None
    assert shape_of(batch) == (DECODE, 1, [0], [0])


# Steps in flight


def test_a_step_is_sent_before_the_previous_one_returns_as_far_as_there_is_room() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_steps_in_flight=2))
    add(scheduler, make_sequence(1, 5))
    kinds = [send(scheduler).kind for _ in range(2)]
    assert (kinds, scheduler.has_room, scheduler.schedule(0.0)) == ([PREFILL, DECODE], False, None)
    assert scheduler.oldest_in_flight is not None
    assert (scheduler.oldest_in_flight.step_id, scheduler.last_returned_step_id) == (1, 0)
    give(scheduler, 501)
    assert (scheduler.oldest_in_flight.step_id, scheduler.last_returned_step_id, scheduler.has_room) == (2, 1, True)
    assert send(scheduler).kind is DECODE


def test_no_row_is_sent_for_a_token_beyond_the_last() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_steps_in_flight=4))
    short, long = make_sequence(1, 5, max_tokens=2), make_sequence(2, 5, max_tokens=3)
    add(scheduler, short, long)
    rows = [send(scheduler).row_slots.tolist() for _ in range(3)]
    assert rows == [[0, 1], [0, 1], [1]]
    assert (scheduler.has_room, scheduler.schedule(0.0)) == (True, None)
    give(scheduler, 501, 502)
    give(scheduler, 601, 602)
    assert rows_for(give(scheduler, 702)) == [(2, 2, [702])]
    assert [completion_of(seq) for seq in (short, long)] == [[501, 601], [502, 602, 702]]


def test_a_result_must_be_of_the_oldest_step_and_fit_it() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(1, 5))
    send(scheduler)
    send(scheduler)
    assert scheduler.oldest_in_flight is not None
    result = result_of(scheduler.oldest_in_flight, 501)
    assert scheduler.validate_result(result, 1000) is None
    late = scheduler.validate_result(replace(result, step_id=2), 1000)
    assert late == "result of step 2, which is not the next one expected"
    two = replace(result, token_ids=np.array([501, 502], np.int32))
    assert scheduler.validate_result(two, 1000) == "2 tokens for 1 rows"
    assert scheduler.validate_result(result, 501) == "a token id is out of range"


def test_a_step_of_coupled_ranks_is_recorded_with_the_pace_of_the_slowest() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(1, 5))
    send(scheduler)
    batch = scheduler.plan(0.0)
    assert batch is not None
    assert scheduler.commit(batch, 1.0, StepPace(PREFILL, 80)) == 2
    give(scheduler, 501)
    record = scheduler.oldest_in_flight
    assert record is not None
    assert (record.kind, record.num_tokens, record.sent_at) == (PREFILL, 80, 1.0)
    # It counts as what this rank computed.
    assert scheduler.num_steps == StepCounts(prefill=1, decode=1)


def test_a_dummy_step_has_no_rows_and_tells_which_slots_were_left() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, 5)
    add(scheduler, seq)
    send(scheduler)
    scheduler.abort(seq, 0.0)
    step_id, batch = scheduler.commit_dummy(0.0, StepPace(DECODE, 7))
    assert (step_id, batch.is_dummy, shape_of(batch), batch.leave_slots) == (2, True, (DECODE, 0, [], []), [0])
    give(scheduler, 501)
    assert scheduler.oldest_in_flight is not None
    assert scheduler.oldest_in_flight.num_tokens == 7
    give(scheduler)
    assert (scheduler.num_steps, scheduler.is_empty) == (StepCounts(prefill=1, dummy=1), True)
    assert scheduler.num_steps.total == 2


# When prompts may enter


def test_a_delayed_prompt_waits_longer_than_a_multiple_of_the_last_prefill() -> None:
    scheduler = make_scheduler(SchedulerPolicy(delay_factor=2.0))
    add(scheduler, make_sequence(1, 5))
    # Nothing runs, so it is not delayed.
    assert send(scheduler, now=0.0).kind is PREFILL
    give(scheduler, 501, now=3.0)
    add(scheduler, make_sequence(2, 5, arrived_at=4.0), make_sequence(3, 5, arrived_at=9.0))
    assert send(scheduler, now=10.0).kind is DECODE
    give(scheduler, 601, now=10.0)
    # The prefill took 3 seconds, and the older of the two has waited for twice that, and then for longer.
    batch = send(scheduler, now=10.5)
    assert shape_of(batch) == (PREFILL, 10, [1, 2], [])


def test_nothing_overtakes_a_preempted_sequence_whose_steps_have_not_returned() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_steps_in_flight=3), facts=worker_facts(num_blocks=2))
    first, last = make_sequence(1, 16), make_sequence(2, 5)
    add(scheduler, first, last)
    send(scheduler)
    # The first needs a second block; the last is preempted for it, which its step in flight still names.
    assert scheduler.schedule(0.0) is None
    assert (last.status, scheduler.num_waiting) == (SequenceStatus.WAITING, 0)
    newcomer = make_sequence(3, 5)
    add(scheduler, newcomer)
    assert scheduler.schedule(0.0) is None
    give(scheduler, 501, 502)
    assert scheduler.waiting_sequences() == [newcomer, last]
    # It arrived at the same time and was admitted before, so it is next.
    batch = send(scheduler)
    assert [entering.num_prompt_tokens for entering in batch.enters] == [5]
    assert (last.status, newcomer.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)


@pytest.mark.parametrize("policy", [QueuePolicy.PRIORITY, QueuePolicy.FCFS])
def test_a_more_urgent_sequence_takes_the_place_of_a_running_one_under_the_priority_policy(
    policy: QueuePolicy,
) -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=1, queue_policy=policy))
    low, high = make_sequence(1, 5, priority=Priority.LOW), make_sequence(2, 5, priority=Priority.HIGH)
    add(scheduler, low)
    send(scheduler)
    give(scheduler, 501)
    add(scheduler, high)
    is_urgent = policy is QueuePolicy.PRIORITY
    assert send(scheduler).kind is (PREFILL if is_urgent else DECODE)
    assert (high.status is SequenceStatus.RUNNING) is is_urgent
    assert scheduler.counters.num_preemptions == is_urgent


def test_nothing_enters_before_the_steps_of_a_preempted_sequence_return_though_blocks_are_free() -> None:
    policy = SchedulerPolicy(queue_policy=QueuePolicy.PRIORITY)
    scheduler = make_scheduler(policy, facts=worker_facts(num_blocks=4))
    low, normal = make_sequence(1, 20, priority=Priority.LOW), make_sequence(2, 40)
    add(scheduler, low)
    send(scheduler)
    # It needs three blocks, and two are free.
    add(scheduler, normal)
    assert (scheduler.schedule(0.0), low.status) == (None, SequenceStatus.WAITING)
    # One would do for the next.
    add(scheduler, make_sequence(3, 5, priority=Priority.HIGH))
    assert (scheduler.schedule(0.0), scheduler.block_counts.free) == (None, 2)
    give(scheduler, 501)
    assert [entering.num_prompt_tokens for entering in send(scheduler).enters] == [5, 40]


def test_looking_ahead_expects_less_of_running_sequences_with_each_decode_step() -> None:
    policy = SchedulerPolicy(admission_policy=AdmissionPolicy.LOOK_AHEAD)
    scheduler = make_scheduler(policy, facts=worker_facts(num_blocks=46))
    add(scheduler, make_sequence(1, 1, max_tokens=508))
    send(scheduler)
    give(scheduler, 501)
    # 45 blocks are free: 704 tokens besides its prompt's block. Both may generate 1007 more: 0.7 * 1007 > 704.
    add(scheduler, make_sequence(2, 1, max_tokens=500))
    assert send(scheduler).kind is DECODE
    give(scheduler, 601)
    # 0.7 * 1006 > 704 > 0.699 * 1006.
    assert send(scheduler).kind is PREFILL


# Leaving


def test_a_withdrawn_sequence_waits_elsewhere_and_has_not_ended() -> None:
    scheduler = make_scheduler()
    seq, other = make_sequence(1, 5), make_sequence(2, 5)
    add(scheduler, seq, other)
    scheduler.withdraw(seq, 2.0)
    assert (scheduler.waiting_sequences(), scheduler.num_waiting_tokens) == ([other], 5)
    assert (seq.status, seq.waited_s, scheduler.counters.num_finished) == (SequenceStatus.WAITING, 2.0, 0)


def test_all_sequences_can_be_taken_with_their_tokens_and_stay_cached() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=2))
    first, second, waiting = make_sequence(1, 20), make_sequence(2, 5), make_sequence(3, 5)
    add(scheduler, first, second, waiting)
    send(scheduler)
    give(scheduler, 501, 502)
    taken = scheduler.take_all(1.0)
    assert set(taken) == {first, second, waiting}
    assert [completion_of(seq) for seq in (first, second, waiting)] == [[501], [502], []]
    assert (scheduler.is_empty, scheduler.block_counts) == (True, (64, 64, 1))
    assert scheduler.num_cached_tokens(first) == 16


def test_unfinished_sequences_are_the_waiting_running_and_retiring_ones() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=3))
    running, retiring, aborted, waiting = (
        make_sequence(handle, 5, max_tokens=max_tokens) for handle, max_tokens in ((1, 9), (2, 1), (3, 9), (4, 9))
    )
    add(scheduler, running, retiring, aborted, waiting)
    send(scheduler)
    scheduler.abort(aborted, 0.0)
    assert scheduler.unfinished() == [waiting, running, retiring]


# The prefix cache


def test_a_waiting_sequence_sees_what_is_cached_unless_its_prompt_must_be_computed() -> None:
    scheduler = make_scheduler()
    first = make_sequence(1, 40)
    add(scheduler, first)
    send(scheduler)
    scored = make_sequence(2, prompt_of(first), options=SamplingOptions(num_prompt_logprobs=0))
    assert scheduler.num_cached_tokens(make_sequence(3, prompt_of(first))) == 32
    assert scheduler.num_cached_tokens(scored) == 0
    assert scheduler.flush_prefix_cache() == 2
    assert scheduler.num_cached_tokens(make_sequence(3, prompt_of(first))) == 0


def test_without_prefix_caching_each_sequence_computes_its_prompt() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    first = make_sequence(1, 40)
    add(scheduler, first, make_sequence(2, prompt_of(first)))
    batch = send(scheduler)
    assert [(entering.num_cached_tokens, entering.chunk.num_tokens) for entering in batch.enters] == [(0, 40)] * 2
    assert scheduler.num_cached_tokens(make_sequence(3, prompt_of(first))) == 0
