"""How sequences end by another's will: stop strings and aborts, in every state, and what an end reports."""

from __future__ import annotations

from services.scheduler.core.batch.sequence import Finish, FinishReason, Numerics, Sequence, SequenceStatus
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.results.outputs import RequestEnd
from shared.ids import RequestHandle
from tests.support.scheduler.core import Parts, completion_of, make_sequence, prompt_of, rows_for
from tests.support.scheduler.engine_driver import worker_facts

STOP_STRING = Finish(FinishReason.STOP_STRING)


def generate(parts: Parts, seq: Sequence, *token_ids: int) -> None:
    """Let a sequence that is alone generate tokens, none of which is stored."""
    parts.send_prefill(seq)
    for number, token_id in enumerate(token_ids):
        if number:
            parts.send_decode()
        parts.give(token_id)


def test_a_stop_string_ends_a_sequence_at_once_with_the_tokens_before_it() -> None:
    parts = Parts()
    seq = make_sequence(1, 5)
    generate(parts, seq, 501, 502, 503)
    end = parts.endings.stop_at(seq, 2, now=4.0)
    assert end == RequestEnd(RequestHandle(1), 2, STOP_STRING)
    assert (seq.status, seq.finish, seq.left_at) == (SequenceStatus.FINISHED, STOP_STRING, 4.0)
    # All that was computed can be shared, also what follows the stop.
    assert (completion_of(seq), parts.blocks.num_free_blocks) == ([501, 502, 503], 64)


def test_a_stop_string_counts_no_token_that_is_not_known() -> None:
    parts = Parts()
    seq = make_sequence(1, 5)
    generate(parts, seq, 501)
    assert parts.endings.stop_at(seq, 9, now=0.0).num_completion_tokens == 1


def test_a_sequence_that_ends_in_flight_keeps_its_blocks_until_its_last_step_has_returned() -> None:
    parts = Parts()
    seq = make_sequence(1, 20)
    generate(parts, seq, 501)
    parts.send_decode()
    parts.send_decode()
    parts.endings.abort(seq, 4.0)
    assert (seq.status, parts.running.sequences()) == (SequenceStatus.EXIT_ENGINE, [])
    assert rows_for(parts.give(502)) == []
    assert parts.blocks.num_free_blocks == 62
    assert rows_for(parts.give(503)) == []
    assert (parts.blocks.num_free_blocks, seq.slot, completion_of(seq)) == (64, None, [501])
    assert parts.num_cached_tokens(prompt_of(seq)) == 16


def test_a_retiring_sequence_can_end_before_its_last_token() -> None:
    parts = Parts()
    seq = make_sequence(1, 5, max_tokens=1)
    parts.send_prefill(seq)
    assert seq.is_retiring
    parts.endings.abort(seq, 0.0)
    outputs = parts.give(501)
    assert (rows_for(outputs), outputs.by_client) == ([], {})
    assert parts.blocks.num_free_blocks == 64


def test_a_waiting_sequence_ends_in_the_queue() -> None:
    parts = Parts()
    seq, other = make_sequence(1, 5), make_sequence(2, 5)
    parts.add(seq, other)
    parts.endings.abort(seq, 2.0)
    assert (list(parts.waiting), seq.status, seq.left_at) == ([other], SequenceStatus.EXIT_ENGINE, 2.0)
    assert parts.endings.stop_at(other, 3, now=2.0) == RequestEnd(RequestHandle(2), 0, STOP_STRING, queue_s=2.0)
    assert (list(parts.waiting), parts.counters.num_finished) == ([], 2)


def test_a_parked_sequence_ends_and_is_not_queued_again() -> None:
    parts = Parts()
    seq = make_sequence(1, 5)
    generate(parts, seq, 501)
    parts.send_decode()
    parts.preemption.preempt(seq, 0.0)
    parts.endings.abort(seq, 0.0)
    assert parts.preemption.num_parked == 0
    assert rows_for(parts.give(502)) == []
    assert (list(parts.waiting), seq.status) == ([], SequenceStatus.EXIT_ENGINE)
    assert parts.blocks.num_free_blocks == 64


def test_a_prompt_that_is_aborted_between_its_chunks_leaves_what_was_sent_cached() -> None:
    parts = Parts(SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=32))
    seq = make_sequence(1, 100)
    parts.add(seq)
    for _ in range(2):
        prefill = parts.plan_prefill(budget=32)
        parts.send(parts.plan_decode(), prefill)
    parts.endings.abort(seq, 0.0)
    assert parts.running.begun == []
    parts.give()
    assert parts.blocks.num_free_blocks == 64 - 7
    parts.give()
    assert parts.blocks.num_free_blocks == 64
    assert parts.num_cached_tokens(prompt_of(seq)) == 64


def test_an_end_tells_how_often_its_sequence_was_resumed_and_whether_exactly() -> None:
    facts = worker_facts(numerics_fingerprint="a", is_exact=True)
    for numerics, is_exact in (
        (None, True),
        (Numerics("a", is_exact=True), True),
        (Numerics("b", is_exact=True), False),
        (Numerics("a", is_exact=False), False),
    ):
        parts = Parts(facts=facts)
        seq = make_sequence(1, 5)
        seq.num_resumes, seq.numerics = 2, numerics
        generate(parts, seq, 501)
        end = parts.endings.finish(seq, STOP_STRING, 0.0, num_completion_tokens=1)
        assert (end.num_resumes, end.is_resume_exact) == (2, is_exact)


def test_where_nothing_is_computed_a_resumed_sequence_ends_as_exact_as_it_was() -> None:
    for is_exact in (True, False):
        parts = Parts(facts=worker_facts(num_blocks=0, numerics_fingerprint="other"))
        seq = make_sequence(1, 5)
        seq.numerics = Numerics("a", is_exact=is_exact)
        parts.add(seq)
        assert parts.endings.stop_at(seq, 0, now=0.0).is_resume_exact is is_exact
