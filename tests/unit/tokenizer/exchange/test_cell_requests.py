"""Requests in the cell, and what happens to them when streams break and open."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from lockstep.internal.v1 import exchange_pb2, sampling_pb2
from lockstep.v1 import common_pb2
from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import (
    DeadlinePassedError,
    ExactUnavailableError,
    ModelChangedError,
    NotSupportedError,
    SchedulerLostError,
)
from shared.request.sampling_codec import decode_options
from shared.request.sampling_params import Pooling, SamplingOptions, SamplingParams
from shared.wire import NOT_INTRODUCED, introduce_self, read_introduction
from tests.support.clients.every_option import unset_options
from tests.support.tokenizer.cell_requests import Requests, Sink
from tests.support.tokenizer.exchange_peer import (
    Position,
    PromptRow,
    Row,
    column,
    make_end,
    make_logprobs,
    make_outputs,
    read_column,
)

EOS, MAX_TOKENS = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS


async def test_a_submit_carries_everything_about_its_request() -> None:
    requests = Requests()
    sampling = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=(4, 5),
        stop_token_sequences=((1, 2), (3,)),
    )
    request = ResolvedRequest("id", column([9, 8]), sampling, common_pb2.PRIORITY_HIGH, b"salt")
    arrived_at = time.monotonic() - 5.0
    handle = requests.submit(request, [Sink()], arrived_at=arrived_at, deadline_at=arrived_at + 25.0)
    submit = await requests.next_submit()
    age_s, time_left_s = submit.age.ToNanoseconds() / 1e9, submit.time_left.ToNanoseconds() / 1e9
    assert age_s >= 5.0
    assert age_s + time_left_s == pytest.approx(25.0, abs=1e-5)
    submit.ClearField("age")
    submit.ClearField("time_left")
    assert submit == exchange_pb2.Submit(
        handle=handle,
        request_id="id",
        prompt_token_ids=column([9, 8]),
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=column([4, 5]),
        stop_token_sequences=[column([1, 2]), column([3])],
        priority=common_pb2.PRIORITY_HIGH,
        cache_salt=b"salt",
        attempt=1,
        n=1,
        determinism=common_pb2.DETERMINISM_ORDINARY,
    )


async def test_without_a_deadline_no_time_left_is_sent() -> None:
    requests = Requests()
    requests.add(Sink())
    assert not (await requests.next_submit()).HasField("time_left")


async def test_rows_and_ends_reach_their_choices() -> None:
    requests = Requests()
    first, second = Sink(), Sink()
    handles = [await requests.begin_request(sink) for sink in (first, second)]
    end = make_end(handles[0], MAX_TOKENS, 3)
    requests.deliver(
        make_outputs(
            Row(handles[1], 0, [7], num_cached_tokens=2), Row(handles[0], 0, [1, 2, 3], num_cached_tokens=3), ends=[end]
        )
    )
    assert (first.token_ids, first.num_cached_tokens, first.ends) == ([1, 2, 3], [3], [end])
    assert (second.token_ids, second.num_cached_tokens, second.ends) == ([7], [2], [])


async def test_an_end_can_arrive_without_tokens() -> None:
    requests = Requests()
    sink = Sink()
    end = make_end(await requests.begin_request(sink), MAX_TOKENS, 0)
    requests.deliver(make_outputs(ends=[end]))
    assert sink.ends == [end]


async def test_a_stop_found_in_text_and_an_abort_are_sent() -> None:
    requests = Requests()
    stopped, aborted = [await requests.begin_request(sink) for sink in (Sink(stop_at=2), Sink())]
    requests.deliver(make_outputs(Row(stopped, 0, [1, 1])))
    requests.abort(aborted)
    message = await requests.next_message()
    assert list(message.stop_ats) == [exchange_pb2.StopAt(handle=stopped, num_tokens=2)]
    assert read_column(message.abort_handles) == [aborted]


async def test_a_request_aborted_before_it_was_sent_is_not_sent() -> None:
    requests = Requests()
    requests.abort(requests.add(Sink(), "gone"))
    requests.add(Sink(), "stays")
    message = await requests.next_message()
    assert [submit.request_id for submit in message.submits] == ["stays"]
    assert message.abort_handles == b""


async def test_outputs_for_finished_requests_are_dropped() -> None:
    requests = Requests()
    ended, stopped, aborted = Sink(), Sink(stop_at=1), Sink()
    handles = [await requests.begin_request(sink) for sink in (ended, stopped, aborted)]
    requests.deliver(make_outputs(ends=[make_end(handles[0], EOS, 0)]))
    requests.deliver(make_outputs(Row(handles[1], 0, [5])))
    requests.abort(handles[2])
    ends = [make_end(handle, EOS, 9) for handle in handles]
    requests.deliver(make_outputs(*(Row(handle, 4, [6]) for handle in (*handles, 999)), ends=ends))
    assert (ended.token_ids, stopped.token_ids, aborted.token_ids) == ([], [5], [])
    assert (len(ended.ends), stopped.ends, aborted.ends) == (1, [], [])


async def test_aborting_a_finished_request_sends_nothing() -> None:
    requests = Requests()
    handle = await requests.begin_request(Sink())
    requests.deliver(make_outputs(ends=[make_end(handle, EOS, 0)]))
    requests.abort(handle)
    requests.add(Sink(), "next")
    assert (await requests.next_message()).abort_handles == b""


async def test_a_lost_stream_pauses_a_request_and_the_next_one_continues_after_its_tokens() -> None:
    requests = Requests()
    sink = Sink()
    handle = await requests.begin_request(sink)
    requests.deliver(make_outputs(Row(handle, 0, [5, 6], num_cached_tokens=2)))
    requests.lose_stream(requests.last_stream)
    assert (sink.ends, sink.error) == ([], None)
    requests.open_next()
    submit = await requests.next_submit()
    assert (submit.handle, submit.attempt, read_column(submit.choices_so_far[0].token_ids)) == (handle, 2, [5, 6])
    requests.deliver(make_outputs(Row(handle, 2, [7]), ends=[make_end(handle, MAX_TOKENS, 3)]))
    assert (sink.token_ids, sink.num_cached_tokens, len(sink.ends)) == ([5, 6, 7], [2], 1)


async def test_resubmissions_are_sent_in_order() -> None:
    requests = Requests()
    waiting, running = [await requests.begin_request(Sink()) for _ in range(2)]
    requests.deliver(make_outputs(Row(running, 0, [5])))
    requests.lose_stream(requests.last_stream)
    requests.open_next()
    submits: list[exchange_pb2.Submit] = []
    while len(submits) < 2:
        submits += (await requests.next_message()).submits
    assert [submit.handle for submit in submits] == [running, waiting]


async def test_a_request_that_ends_while_waiting_is_not_submitted_again() -> None:
    requests = Requests()
    gone, stays = [await requests.begin_request(Sink()) for _ in range(2)]
    requests.lose_stream(requests.last_stream)
    requests.abort(gone)
    requests.open_next()
    submit = await requests.next_submit()
    assert submit.handle == stays


async def test_a_resubmission_meant_for_a_lost_stream_is_sent_only_on_the_next_one() -> None:
    requests = Requests()
    handle = await requests.begin_request(Sink())
    requests.lose_stream(requests.last_stream)
    lost = requests.open_next()
    requests.lose_stream(lost)
    requests.open_next()
    assert (await requests.next_submit()).handle == handle
    assert [message async for message in lost.messages()] == []


async def test_without_a_stream_a_new_request_waits_for_the_next_one_as_those_in_flight() -> None:
    requests = Requests()
    old = await requests.begin_request(Sink())
    requests.lose_stream(requests.last_stream)
    new, gone = requests.add(Sink(), "new"), requests.add(Sink(), "gone")
    late = Sink()
    requests.add(late, "late", deadline_at=time.monotonic() + 0.01)
    await late.failed.wait()
    assert isinstance(late.error, DeadlinePassedError)
    requests.abort(gone)
    requests.open_next()
    attempts: dict[int, int] = {}
    while len(attempts) < 2:
        attempts |= {submit.handle: submit.attempt for submit in (await requests.next_message()).submits}
    assert attempts == {old: 2, new: 1}


async def test_a_new_request_is_refused_once_requests_no_longer_wait_for_a_scheduler() -> None:
    requests = Requests(lost_after_s=0.0)
    requests.lose_stream(requests.last_stream)
    with pytest.raises(SchedulerLostError):
        requests.add(Sink())


async def test_a_request_that_waits_for_its_first_submit_is_checked_against_the_next_cell() -> None:
    requests = Requests(exact_fingerprint="a")
    requests.lose_stream(requests.last_stream)
    exact, other = Sink(), Sink()
    request = ResolvedRequest("exact", column([1]), SamplingParams(max_tokens=4), is_exact=True)
    requests.submit(request, [exact], arrived_at=time.monotonic(), deadline_at=None)
    handle = requests.add(other)
    requests.open_next()
    assert isinstance(exact.error, ExactUnavailableError)
    assert (await requests.next_submit()).handle == handle


async def test_other_weights_end_what_has_begun_and_not_what_waits_for_its_first_submit() -> None:
    requests = Requests()
    begun, waiting = Sink(), Sink()
    await requests.begin_request(begun)
    requests.lose_stream(requests.last_stream)
    handle = requests.add(waiting, "waiting")
    requests.fail_begun(ModelChangedError(""))
    assert (type(begun.error), waiting.error) == (ModelChangedError, None)
    requests.open_next()
    assert (await requests.next_submit()).handle == handle


async def test_a_scheduler_that_does_not_return_ends_the_waiting_requests() -> None:
    requests = Requests(lost_after_s=0.05)
    sink = Sink()
    await requests.begin_request(sink)
    requests.lose_stream(requests.last_stream)
    assert sink.error is None
    await sink.failed.wait()
    assert isinstance(sink.error, SchedulerLostError)


async def test_without_any_time_to_wait_requests_end_with_their_stream() -> None:
    requests = Requests(lost_after_s=0.0)
    sink = Sink()
    await requests.begin_request(sink)
    requests.lose_stream(requests.last_stream)
    assert isinstance(sink.error, SchedulerLostError)


async def test_a_deadline_ends_a_request_that_waits_for_a_scheduler() -> None:
    requests = Requests()
    sink = Sink()
    await requests.begin_request(sink, deadline_at=time.monotonic() + 0.05)
    requests.lose_stream(requests.last_stream)
    await sink.failed.wait()
    assert isinstance(sink.error, DeadlinePassedError)


async def test_fail_all_fails_each_request_once() -> None:
    requests = Requests()
    sink = Sink()
    handle = await requests.begin_request(sink)
    requests.lose_stream(requests.last_stream)
    error = SchedulerLostError("another model")
    requests.fail_all(error)
    assert sink.error is error
    requests.abort(handle)
    requests.open_next()
    requests.add(Sink(), "next")
    assert (await requests.next_submit()).request_id == "next"


async def test_every_option_is_sent() -> None:
    requests = Requests()
    options = SamplingOptions(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((3, -100.0), (7, 2.0)),
        bad_words=((1, 2), (3,)),
        min_tokens=4,
        num_logprobs=0,
        num_prompt_logprobs=5,
        grammar="root",
        reasoning_begin=(8,),
        reasoning_end=(9, 10),
        allowed_token_ids=(2, 5),
        logprob_token_ids=(7, 1, 7),
        pooling=Pooling.MEAN,
    )
    assert not unset_options(options)
    request = ResolvedRequest("id", column([9]), SamplingParams(7, options=options))
    requests.submit(request, [Sink()], arrived_at=0.0, deadline_at=None)
    submit = await requests.next_submit()
    assert decode_options(submit.options) == options
    requests.add(Sink())
    assert not (await requests.next_submit()).HasField("options")


async def test_choices_use_consecutive_handles() -> None:
    requests = Requests()
    first, second = Sink(), Sink()
    handle = await requests.begin_choices(first, second)
    other = Sink()
    assert await requests.begin_request(other) == handle + 2
    end = make_end(handle, MAX_TOKENS, 2)
    requests.deliver(make_outputs(Row(handle, 0, [5, 6]), Row(handle + 1, 0, [7], num_cached_tokens=2), ends=[end]))
    assert (first.token_ids, first.ends) == ([5, 6], [end])
    assert (second.token_ids, second.num_cached_tokens, second.ends) == ([7], [2], [])


async def test_a_stop_found_in_text_is_sent_for_its_choice_and_an_abort_for_the_others() -> None:
    requests = Requests()
    stopped, other = Sink(stop_at=1), Sink()
    handle = await requests.begin_choices(other, stopped)
    requests.deliver(make_outputs(Row(handle, 0, [5]), Row(handle + 1, 0, [6])))
    requests.abort(handle)
    requests.abort(handle)
    message = await requests.next_message()
    assert list(message.stop_ats) == [exchange_pb2.StopAt(handle=handle + 1, num_tokens=1)]
    assert read_column(message.abort_handles) == [handle]
    requests.deliver(make_outputs(Row(handle, 1, [7]), Row(handle + 1, 1, [8])))
    assert (other.token_ids, stopped.token_ids) == ([5], [6])


async def test_aborting_a_request_whose_choices_have_all_ended_sends_nothing() -> None:
    requests = Requests()
    handle = await requests.begin_choices(Sink(stop_at=1), Sink())
    requests.deliver(make_outputs(Row(handle, 0, [5]), ends=[make_end(handle + 1, EOS, 0)]))
    await requests.next_message()
    requests.abort(handle)
    requests.add(Sink(), "next")
    assert (await requests.next_message()).abort_handles == b""


async def test_the_next_scheduler_learns_which_choices_ended_by_a_stop_string() -> None:
    requests = Requests()
    handle = await requests.begin_choices(Sink(stop_at=2), Sink(), Sink())
    requests.deliver(make_outputs(Row(handle, 0, [5, 6]), Row(handle + 1, 0, [7]), ends=[make_end(handle + 2, EOS, 0)]))
    requests.lose_stream(requests.last_stream)
    requests.open_next()
    submit = await requests.next_submit()
    assert (submit.handle, submit.n, submit.attempt) == (handle, 3, 2)
    choices = [(read_column(choice.token_ids), choice.has_ended) for choice in submit.choices_so_far]
    assert choices == [([5, 6], True), ([7], False), ([], True)]


async def test_fail_all_fails_each_open_choice() -> None:
    requests = Requests()
    ended, first, second = Sink(), Sink(), Sink()
    handle = await requests.begin_choices(ended, first, second)
    requests.deliver(make_outputs(ends=[make_end(handle, EOS, 0)]))
    error = SchedulerLostError("another model")
    requests.fail_all(error)
    assert (ended.error, first.error, second.error) == (None, error, error)


def positions(*token_ids: int) -> list[Position]:
    return [Position(1, [(token_id, -0.5), (9, -1.0)]) for token_id in token_ids]


async def test_log_probabilities_arrive_just_before_their_tokens() -> None:
    requests = Requests()
    with_some, without = Sink(), Sink()
    handles = [await requests.begin_request(sink) for sink in (without, with_some)]
    requests.deliver(make_outputs(Row(handles[0], 0, [5, 6]), Row(handles[1], 0, [7, 8], logprobs=positions(7, 8))))
    requests.deliver(make_outputs(Row(handles[1], 2, [3], logprobs=positions(3)), Row(handles[0], 2, [4])))
    assert with_some.logprobs == [(0, [7, 8]), (2, [3])]
    assert (without.token_ids, without.logprobs) == ([5, 6, 4], [])


async def test_log_probabilities_of_repeated_tokens_are_dropped_with_them() -> None:
    requests = Requests()
    sink = Sink()
    handle = await requests.begin_request(sink)
    requests.deliver(make_outputs(Row(handle, 0, [5, 6], logprobs=positions(5, 6))))
    requests.lose_stream(requests.last_stream)
    requests.open_next()
    await requests.next_submit()
    requests.deliver(make_outputs(Row(handle, 0, [5, 6, 7], logprobs=positions(5, 6, 7))))
    requests.deliver(make_outputs(Row(handle, 1, [6, 7], logprobs=positions(6, 7))))
    assert (sink.token_ids, sink.logprobs) == ([5, 6, 7], [(0, [5, 6]), (2, [7])])


async def test_each_prompt_position_is_delivered_once() -> None:
    requests = Requests()
    sink, other = Sink(), Sink()
    handle = await requests.begin_choices(sink, other)
    requests.deliver(make_outputs(prompts=[PromptRow(handle, 1, positions(2))]))
    # After a preemption, the prompt is computed again.
    requests.deliver(make_outputs(prompts=[PromptRow(handle, 1, positions(2, 3))]))
    requests.deliver(make_outputs(prompts=[PromptRow(handle, 1, positions(2, 3)), PromptRow(99, 1, positions(5))]))
    assert (sink.prompt_ids, other.prompt_ids) == ([2, 3], [])


def outputs(**columns: Sequence[int]) -> exchange_pb2.Outputs:
    """Outputs of one row, except for the given columns."""
    row: dict[str, Sequence[int]] = {"handles": [1], "first_indexes": [0], "counts": [1], "token_ids": [5]}
    message = exchange_pb2.Outputs()
    for name, values in (row | columns).items():
        setattr(message, name, column(values))
    return message


def outputs_with(logprobs: sampling_pb2.Logprobs) -> exchange_pb2.Outputs:
    """Outputs of two tokens in one row."""
    message = make_outputs(Row(1, 0, [5, 6]))
    message.logprobs.CopyFrom(logprobs)
    return message


def prompt_with(logprobs: sampling_pb2.Logprobs) -> exchange_pb2.Outputs:
    """Outputs of a prompt."""
    return exchange_pb2.Outputs(prompt_logprobs=[exchange_pb2.PromptLogprobs(handle=1, logprobs=logprobs)])


def broken(**columns: bytes) -> sampling_pb2.Logprobs:
    """Log-probabilities of two tokens, except for the given columns."""
    logprobs = make_logprobs(dict(enumerate(positions(5, 6))))
    for name, data in columns.items():
        setattr(logprobs, name, data)
    return logprobs


@pytest.mark.parametrize(
    "message",
    [
        outputs_with(broken(indexes=column([1, 0]))),
        outputs_with(broken(indexes=column([0, 2]))),
        outputs_with(broken(indexes=column([-1, 1]))),
        outputs_with(broken(ranks=column([1]))),
        outputs_with(broken(counts=column([4, 0]))),
        outputs_with(broken(counts=column([2, 3]))),
        outputs_with(broken(values=b"123")),
        outputs_with(broken(requested_counts=column([0]))),
        outputs_with(broken(requested_counts=column([1, -1]))),
        outputs_with(broken(requested_counts=column([9, 0]), ranks=column(range(11)))),
        outputs_with(make_logprobs({1: positions(6)[0]})),
        prompt_with(sampling_pb2.Logprobs()),
        prompt_with(make_logprobs({1: positions(6)[0], 3: positions(7)[0]})),
        prompt_with(make_logprobs({2: positions(6)[0]})),
    ],
    ids=[
        "order",
        "beyond",
        "negative",
        "ranks",
        "empty",
        "entries",
        "bytes",
        "requested",
        "negative requested",
        "too many requested",
        "half-a-row",
        "none",
        "gap",
        "missing",
    ],
)
async def test_malformed_log_probabilities_are_refused_before_any_choice_gets_them(
    message: exchange_pb2.Outputs,
) -> None:
    requests = Requests()
    sink = Sink()
    assert await requests.begin_request(sink) == 1
    with pytest.raises(ExchangeError):
        requests.deliver(message)
    assert (sink.token_ids, sink.logprobs, sink.prompt_ids) == ([], [], [])


@pytest.mark.parametrize(
    "message",
    [
        outputs(handles=[1, 2]),
        outputs(counts=[2]),
        outputs(counts=[-1], token_ids=[]),
        outputs(handles=[1, 1], first_indexes=[0, 0], counts=[-1, 2]),
        outputs(first_indexes=[]),
        outputs(first_indexes=[1]),
        exchange_pb2.Outputs(handles=b"123"),
    ],
    ids=["rows", "tokens", "negative", "negative-sum", "indexes", "gap", "bytes"],
)
async def test_malformed_outputs_are_refused(message: exchange_pb2.Outputs) -> None:
    requests = Requests()
    assert await requests.begin_request(Sink()) == 1
    with pytest.raises(ExchangeError):
        requests.deliver(message)


async def test_choices_learn_how_often_their_request_was_resumed() -> None:
    requests = Requests(exact_fingerprint="a")
    first, second = Sink(), Sink()
    handle = await requests.begin_choices(first, second)
    requests.deliver(make_outputs(ends=[make_end(handle, EOS, 0)]))
    for fingerprint in ("a", "b"):
        requests.lose_stream(requests.last_stream)
        requests.open_next(exact_fingerprint=fingerprint)
        assert (await requests.next_submit()).num_earlier_resumes == len(second.resumes) - 1
    assert (first.resumes, second.resumes) == ([(0, True)], [(0, True), (1, True), (2, False)])
    assert (requests.counters.num_resubmissions, requests.counters.num_lost_links) == (2, 2)


async def test_a_cell_of_wire_version_0_gets_no_options() -> None:
    request = ResolvedRequest("r", column([1]), SamplingParams(max_tokens=4, options=SamplingOptions(min_p=0.5)))
    requests, sink = Requests(), Sink()
    requests.lose_stream(requests.last_stream)
    requests.open_next(introduction=NOT_INTRODUCED)
    requests.add(Sink())
    assert not (await requests.next_submit()).HasField("options")
    with pytest.raises(NotSupportedError, match="min_p"):
        requests.submit(request, [sink], arrived_at=0.0, deadline_at=None)
    requests.note_cell(exchange_pb2.CellInfo(introduction=introduce_self().encode()))
    requests.submit(request, [sink], arrived_at=0.0, deadline_at=None)
    assert (await requests.next_submit()).options.min_p == 0.5
    # It is not resumed in an older cell.
    requests.lose_stream(requests.last_stream)
    requests.open_next(introduction=NOT_INTRODUCED)
    assert isinstance(sink.error, NotSupportedError)


async def test_a_streams_first_message_introduces_the_replica() -> None:
    requests = Requests()
    requests.add(Sink())
    requests.last_stream.beat()
    assert read_introduction((await requests.next_message()).introduction) == introduce_self()
    requests.last_stream.beat()
    assert not (await requests.next_message()).HasField("introduction")


async def test_an_exact_request_needs_an_exact_cell() -> None:
    request = ResolvedRequest("r", column([1]), SamplingParams(max_tokens=4), is_exact=True)
    requests, sink = Requests(), Sink()
    with pytest.raises(ExactUnavailableError):
        requests.submit(request, [sink], arrived_at=0.0, deadline_at=None)
    requests.lose_stream(requests.last_stream)
    requests.open_next(exact_fingerprint="a")
    requests.submit(request, [sink], arrived_at=0.0, deadline_at=None)
    assert (await requests.next_submit()).determinism == common_pb2.DETERMINISM_EXACT
    requests.lose_stream(requests.last_stream)
    requests.open_next(exact_fingerprint="b")
    assert isinstance(sink.error, ExactUnavailableError)
