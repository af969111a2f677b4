"""What survives the loss of a rank's worker, and what the next worker computes."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.core.batch.sequence import Numerics
from services.scheduler.core.batch.step import StepCounts
from services.scheduler.core.policy import SchedulerPolicy
from shared.step.step import StepKind
from tests.support.scheduler.core import add, completion_of, give, make_scheduler, make_sequence, rows_for, send
from tests.support.scheduler.engine_driver import worker_facts


def test_a_lost_worker_leaves_all_sequences_with_their_tokens_in_the_order_in_which_they_should_wait() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=4))
    ended, retiring, first, second = (
        make_sequence(handle, 5, max_tokens=max_tokens) for handle, max_tokens in ((1, 9), (2, 2), (3, 9), (4, 9))
    )
    waiting = make_sequence(5, 5)
    add(scheduler, ended, retiring, first, second, waiting)
    send(scheduler)
    give(scheduler, 501, 502, 503, 504)
    send(scheduler)
    scheduler.abort(ended, 0.0)
    lost = scheduler.end_epoch(1.0)
    assert lost.sequences == [first, second, retiring, waiting]
    assert lost.computed == [first, second, retiring]
    assert lost.in_flight == [retiring.key, first.key, second.key]
    # The tokens in flight are lost.
    assert [completion_of(seq) for seq in lost.sequences] == [[503], [504], [502], []]
    assert [seq.num_resumes for seq in lost.sequences] == [1, 1, 1, 0]
    assert (scheduler.is_empty, scheduler.block_counts.total, scheduler.schedule(1.0)) == (True, 0, None)


def test_no_more_sequences_run_than_the_worker_has_room_for() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=4), facts=replace(worker_facts(), max_num_seqs=2))
    add(scheduler, *(make_sequence(handle, 5) for handle in range(1, 5)))
    assert len(send(scheduler).enters) == 2
    scheduler.end_epoch(1.0)
    scheduler.begin_epoch(worker_facts(epoch=2))
    add(scheduler, *(make_sequence(handle, 5) for handle in range(1, 5)))
    assert len(send(scheduler).enters) == 4


def test_a_sequence_continues_with_its_tokens_on_the_next_worker() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, 5, max_tokens=3)
    add(scheduler, seq)
    send(scheduler)
    give(scheduler, 501)
    send(scheduler)
    [lost] = scheduler.end_epoch(1.0).sequences
    scheduler.begin_epoch(worker_facts(num_blocks=8, epoch=2))
    scheduler.add(lost, 1.0)
    batch = send(scheduler)
    assert (batch.kind, batch.num_tokens, batch.row_slots.tolist()) == (StepKind.PREFILL, 6, [0])
    assert scheduler.oldest_in_flight is not None
    assert scheduler.oldest_in_flight.step_id == 1
    # It had its start before.
    outputs = give(scheduler, 502)
    assert (rows_for(outputs), outputs.by_client[1].starts) == ([(1, 1, [502])], [])
    assert scheduler.num_steps == StepCounts(prefill=2, decode=1)


def test_the_numerics_of_every_worker_that_computed_a_sequence_are_joined() -> None:
    scheduler = make_scheduler(facts=worker_facts(numerics_fingerprint="a", is_exact=True))
    seq = make_sequence(1, 5)
    for fingerprint, joint in (("a", Numerics("a", True)), ("a", Numerics("a", True)), ("b", Numerics("a", False))):
        scheduler.begin_epoch(worker_facts(numerics_fingerprint=fingerprint, is_exact=True))
        add(scheduler, seq)
        send(scheduler)
        scheduler.end_epoch(0.0)
        assert seq.numerics == joint
    assert seq.num_resumes == 3


def test_a_kv_feed_lasts_over_epochs_until_it_is_closed() -> None:
    scheduler = make_scheduler()
    feed = scheduler.open_kv_feed()
    scheduler.end_epoch(0.0)
    scheduler.begin_epoch(worker_facts())
    feed.advance(100)
    while feed.has_changes:
        feed.take()
    add(scheduler, make_sequence(1, 20))
    send(scheduler)
    feed.advance(100)
    assert (feed.take().num_blocks, feed.has_changes) == (1, False)
    scheduler.close_kv_feed()
    add(scheduler, make_sequence(2, 20))
    send(scheduler)
    feed.advance(100)
    assert not feed.has_changes
