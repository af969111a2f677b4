"""How a step's result becomes tokens, starts and ends for clients, whatever happened since the step was sent."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.batch.sequence import Finish, FinishReason, SequenceStatus
from services.scheduler.core.planning.decode import Decodes
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.results.outputs import OutputsByClient, RequestEnd, RequestStart
from services.scheduler.core.step_deadline import FIRST_STEP_S
from shared.errors import InvalidRequestError, NumericError
from shared.ids import RequestHandle
from shared.request.sampling_params import Pooling, SamplingOptions
from shared.step.logprobs import Logprobs
from tests.support.scheduler.core import Parts, completion_of, ends_of, make_sequence, prompt_of, rows_for
from tests.support.scheduler.engine_driver import EOS

STOP = Finish(FinishReason.STOP_TOKEN, 9)
LENGTH = Finish(FinishReason.MAX_TOKENS)


def errors_of(outputs: OutputsByClient) -> list[tuple[int, type]]:
    return [(end.handle, type(end.error)) for end in ends_of(outputs)]


# Tokens


def test_each_row_gets_its_token() -> None:
    parts = Parts()
    first, second = make_sequence(1, 5), make_sequence(2, 9)
    parts.start(first, second)
    outputs = parts.run_decode(601, 602)
    # Tokens are numbered from the first one of the completion.
    assert rows_for(outputs) == [(1, 1, [601]), (2, 1, [602])]
    assert ends_of(outputs) == []
    assert parts.running.slots.num_tokens[:2].tolist() == [7, 11]
    parts.running.store(second)
    assert completion_of(second) == [502, 602]


def test_each_client_gets_its_own_rows_and_ends() -> None:
    parts = Parts()
    seqs = [make_sequence(handle, 5, client=handle % 2 + 1, stop_token_ids=(9,)) for handle in (1, 2, 3)]
    parts.start(*seqs)
    outputs = parts.run_decode(601, 9, 603)
    assert rows_for(outputs, client=1) == [(2, 1, [9])]
    assert rows_for(outputs, client=2) == [(1, 1, [601]), (3, 1, [603])]
    assert ends_of(outputs, client=1) == [RequestEnd(RequestHandle(2), 2, STOP)]
    assert ends_of(outputs, client=2) == []


def test_a_first_token_starts_its_request() -> None:
    parts = Parts()
    first = make_sequence(1, 20)
    parts.send_prefill(first, now=0.0)
    second = make_sequence(2, prompt_of(first), arrived_at=1.0)
    parts.send_prefill(second, now=4.0)
    assert parts.give(501, now=5.0).by_client[1].starts == [RequestStart(RequestHandle(1), 0, 0.0, 5.0)]
    # It found a block cached, waited for 3 seconds and was computed for 2.
    assert parts.give(502, now=6.0).by_client[1].starts == [RequestStart(RequestHandle(2), 16, 3.0, 2.0)]
    parts.send_decode(now=6.0)
    assert parts.give(601, 602, now=7.0).by_client[1].starts == []


def test_a_request_starts_in_a_mixed_step_and_a_preempted_one_does_not_start_again() -> None:
    parts = Parts()
    first, second = make_sequence(1, 5), make_sequence(2, 5)
    parts.start(first)
    parts.preemption.preempt(first, 1.0)
    parts.send_prefill(second, now=1.0)
    outputs = parts.give(601, 502, now=2.0)
    assert [start.handle for start in outputs.by_client[1].starts] == [2]
    assert rows_for(outputs) == [(1, 1, [601]), (2, 0, [502])]
    parts.add(make_sequence(3, 5))
    parts.send(parts.plan_decode(), parts.plan_prefill())
    outputs = parts.give(701, 602, 503)
    assert [start.handle for start in outputs.by_client[1].starts] == [3]


def test_the_last_steps_with_prompts_tell_how_long_a_prefill_takes() -> None:
    parts = Parts()
    assert parts.postprocessor.last_prefill_latency == 0.0
    parts.send_prefill(make_sequence(1, 5), now=1.0)
    parts.give(501, now=4.0)
    parts.send_decode(now=4.0)
    parts.give(601, now=9.0)
    assert parts.postprocessor.last_prefill_latency == 3.0


def test_a_result_tells_how_long_the_next_step_may_take() -> None:
    parts = Parts()
    parts.send_prefill(make_sequence(1, 5), now=0.0)
    parts.give(501, now=1.0)
    parts.send_decode(now=1.0)
    parts.send_decode(now=1.0)
    assert parts.deadline.time == 1.0 + FIRST_STEP_S
    parts.give(601, now=3.0)
    # Ten times the 2 seconds of the first one, from its result on.
    assert parts.deadline.time == 3.0 + 20.0


# Stops


@pytest.mark.parametrize(
    ("token_id", "params", "finish"),
    [
        (601, {}, None),
        (EOS, {}, Finish(FinishReason.EOS, EOS)),
        (EOS, {"ignore_eos": True}, None),
        (9, {"stop_token_ids": (9,)}, STOP),
        (9, {"stop_token_sequences": ((501, 9),)}, Finish(FinishReason.STOP_SEQUENCE)),
        (601, {"max_tokens": 2}, LENGTH),
        (9, {"max_tokens": 2, "stop_token_ids": (9,)}, STOP),
    ],
)
def test_a_token_that_stops_its_sequence_is_its_last(
    token_id: int, params: dict[str, object], finish: Finish | None
) -> None:
    parts = Parts()
    seq, neighbour = make_sequence(1, 5, **params), make_sequence(2, 5)  # type: ignore[arg-type]
    parts.start(seq, neighbour)
    outputs = parts.run_decode(token_id, 602)
    assert rows_for(outputs) == [(1, 1, [token_id]), (2, 1, [602])]
    assert ends_of(outputs) == ([] if finish is None else [RequestEnd(RequestHandle(1), 2, finish)])
    assert parts.running.sequences() == ([seq, neighbour] if finish is None else [neighbour])
    assert (seq.status is SequenceStatus.FINISHED, seq.finish) == (finish is not None, finish)


def test_a_sequence_that_ended_holds_nothing_after_its_last_step() -> None:
    parts = Parts()
    seq = make_sequence(1, 17, max_tokens=2)
    parts.start(seq)
    assert 64 - parts.blocks.num_free_blocks == 2
    parts.run_decode(601)
    assert (parts.blocks.num_free_blocks, seq.slot, completion_of(seq)) == (64, None, [501, 601])
    assert (seq.left_at, parts.counters.num_finished, parts.counters.num_completion_tokens) == (0.0, 1, 2)
    # Its full block can be found, but not its last token, which no step has computed.
    assert parts.num_cached_tokens([*prompt_of(seq), 501, 601, 1]) == 16


def test_a_sequence_that_no_longer_runs_ends_with_its_last_token_and_no_earlier() -> None:
    parts = Parts()
    seq = make_sequence(1, 5, max_tokens=3)
    parts.send_prefill(seq)
    parts.send_decode()
    parts.send_decode()
    # All three tokens are in flight, so it gets no further row.
    assert (parts.running.sequences(), seq.status) == ([], SequenceStatus.RUNNING)
    assert ends_of(parts.give(501)) == []
    assert ends_of(parts.give(502)) == []
    outputs = parts.give(503)
    assert (rows_for(outputs), ends_of(outputs)) == ([(1, 2, [503])], [RequestEnd(RequestHandle(1), 3, LENGTH)])


# What happened since the step was sent


def test_rows_of_sequences_that_ended_since_are_dropped_and_the_others_get_their_own() -> None:
    parts = Parts()
    first, second, third = (make_sequence(handle, 5, stop_token_ids=(9,)) for handle in range(1, 4))
    parts.send_prefill(first, second, third)
    parts.send_decode()
    assert ends_of(parts.give(501, 9, 503)) == [RequestEnd(RequestHandle(2), 1, STOP)]
    # The running ones are rows 0 and 1 now; the step in flight has three.
    assert parts.running.order.tolist() == [0, 2]
    assert second.slot == 1
    outputs = parts.give(601, 602, 603)
    assert (rows_for(outputs), ends_of(outputs)) == ([(1, 1, [601]), (3, 1, [603])], [])
    assert completion_of(second) == [9]
    assert second.slot is None


def test_an_aborted_sequence_gets_nothing_and_its_slot_is_reused_only_after_its_steps() -> None:
    parts = Parts(SchedulerPolicy(max_num_seqs=2))
    first, aborted, newcomer = (make_sequence(handle, 5) for handle in range(1, 4))
    parts.send_prefill(first, aborted)
    parts.endings.abort(aborted, 0.0)
    parts.add(newcomer)
    assert parts.plan_prefill().is_empty
    outputs = parts.give(501, 502)
    assert (rows_for(outputs), ends_of(outputs)) == ([(1, 0, [501])], [])
    assert [start.handle for start in outputs.by_client[1].starts] == [1]
    parts.send(Decodes(), parts.plan_prefill())
    assert (newcomer.slot, rows_for(parts.give(503))) == (1, [(3, 0, [503])])


def test_the_tokens_in_flight_of_a_preempted_sequence_count_and_then_it_waits() -> None:
    parts = Parts()
    seq = make_sequence(1, 5, arrived_at=0.0)
    parts.send_prefill(seq)
    parts.send_decode()
    parts.preemption.preempt(seq, 1.0)
    assert (seq.status, list(parts.waiting), parts.preemption.num_parked) == (SequenceStatus.WAITING, [], 1)
    assert rows_for(parts.give(501, now=2.0)) == [(1, 0, [501])]
    assert list(parts.waiting) == []
    assert rows_for(parts.give(502, now=3.0)) == [(1, 1, [502])]
    assert (list(parts.waiting), parts.preemption.num_parked, seq.queued_at) == ([seq], 0, 3.0)
    assert (completion_of(seq), seq.slot, parts.blocks.num_free_blocks) == ([501, 502], None, 64)


def test_a_preempted_sequence_that_a_token_in_flight_stops_ends_and_does_not_wait() -> None:
    parts = Parts()
    seq = make_sequence(1, 5, stop_token_ids=(9,))
    parts.send_prefill(seq)
    parts.send_decode()
    parts.preemption.preempt(seq, 1.0)
    assert ends_of(parts.give(9)) == [RequestEnd(RequestHandle(1), 1, STOP)]
    assert rows_for(parts.give(502)) == []
    assert (list(parts.waiting), parts.preemption.num_parked, completion_of(seq)) == ([], 0, [9])
    assert parts.blocks.num_free_blocks == 64


# Rows that fail


def test_a_row_whose_logits_are_not_finite_fails_alone_and_its_blocks_are_found_no_more() -> None:
    parts = Parts()
    good, bad = make_sequence(1, 20), make_sequence(2, 20)
    parts.start(good, bad)
    parts.send_decode()
    outputs = parts.give(601, 602, not_finite=(1,))
    assert rows_for(outputs) == [(1, 1, [601])]
    assert errors_of(outputs) == [(2, NumericError)]
    assert (completion_of(bad), bad.status, bad.slot) == ([502], SequenceStatus.EXIT_ENGINE, None)
    assert [parts.num_cached_tokens(prompt_of(seq)) for seq in (good, bad)] == [16, 0]


def test_a_row_that_is_not_finite_after_its_request_ended_has_no_second_end_but_hides_its_blocks() -> None:
    parts = Parts()
    seq = make_sequence(1, 20)
    parts.send_prefill(seq)
    parts.endings.abort(seq, 0.0)
    assert parts.num_cached_tokens(prompt_of(seq)) == 16
    outputs = parts.give(501, not_finite=(0,))
    assert (ends_of(outputs), rows_for(outputs)) == ([], [])
    assert parts.num_cached_tokens(prompt_of(seq)) == 0
    assert parts.counters.num_finished == 1


def test_a_row_whose_grammar_failed_fails_alone_without_its_token_and_stays_cached() -> None:
    parts = Parts()
    good, bad = make_sequence(1, 20), make_sequence(2, 20)
    parts.start(good, bad)
    parts.send_decode()
    outputs = parts.give(601, 602, failed_grammar=(1,))
    assert rows_for(outputs) == [(1, 1, [601])]
    assert errors_of(outputs) == [(2, InvalidRequestError)]
    assert (completion_of(bad), bad.status) == ([502], SequenceStatus.EXIT_ENGINE)
    assert parts.num_cached_tokens(prompt_of(bad)) == 16


def test_a_failed_grammar_of_a_request_that_has_ended_is_no_second_end() -> None:
    parts = Parts()
    first, second = make_sequence(1, 5), make_sequence(2, 5)
    parts.send_prefill(first, second)
    parts.endings.abort(first, 0.0)
    outputs = parts.give(501, 502, failed_grammar=(0,))
    assert (rows_for(outputs), ends_of(outputs)) == ([(2, 0, [502])], [])


# Log-probabilities of prompts


def scores(*positions: int) -> Logprobs:
    """One entry for each of these positions."""
    ones = np.ones(len(positions), np.int32)
    indexes = np.array(positions, np.int32)
    return Logprobs(indexes, ones, ones, 100 + indexes, np.zeros(len(positions), np.float32))


def delivered(outputs: OutputsByClient) -> list[tuple[int, list[int]]]:
    """The positions of prompt log-probabilities, by handle."""
    prompt_logprobs = outputs.by_client[1].prompt_logprobs if outputs.by_client else []
    return [(handle, one.indexes.tolist()) for handle, one in prompt_logprobs]


def test_prompt_log_probabilities_are_delivered_once_in_order() -> None:
    parts = Parts()
    options = SamplingOptions(num_prompt_logprobs=0)
    seq = make_sequence(1, 8, options=options)
    parts.send_prefill(seq)
    assert delivered(parts.give(501, prompt_logprobs=((0, scores(1, 2, 3, 4)),))) == [(1, [1, 2, 3, 4])]
    assert seq.last_prompt_logprob == 4
    parts.send_decode()
    # As after a preemption, some are computed again.
    assert delivered(parts.give(601, prompt_logprobs=((0, scores(3, 4, 5, 6)),))) == [(1, [5, 6])]
    parts.send_decode()
    assert delivered(parts.give(602, prompt_logprobs=((0, scores(5, 6)),))) == []


def test_a_request_that_has_ended_gets_no_prompt_log_probabilities() -> None:
    parts = Parts()
    seq = make_sequence(1, 8, options=SamplingOptions(num_prompt_logprobs=0))
    parts.send_prefill(seq)
    parts.endings.abort(seq, 0.0)
    assert delivered(parts.give(501, prompt_logprobs=((0, scores(1, 2)),))) == []


def test_a_vector_comes_with_the_end_of_its_request_unless_that_has_ended() -> None:
    options, values = SamplingOptions(pooling=Pooling.LAST), np.array([0.5, -1.0], np.float32)
    parts = Parts()
    parts.send_prefill(make_sequence(1, 8, max_tokens=1, options=options))
    outputs = parts.give(0, vectors=((0, values),)).by_client[1]
    assert [(handle, vector.tolist()) for handle, vector in outputs.vectors] == [(1, [0.5, -1.0])]
    assert [end.handle for end in outputs.ends] == [1]
    parts = Parts()
    ended = make_sequence(1, 8, max_tokens=1, options=options)
    parts.send_prefill(ended)
    parts.endings.abort(ended, 0.0)
    assert not parts.give(0, vectors=((0, values),)).by_client
