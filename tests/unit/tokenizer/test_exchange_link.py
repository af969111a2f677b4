from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from services.tokenizer.exchange_link import ExchangeError, ExchangeLink
from services.tokenizer.request import ResolvedRequest
from shared.errors import SchedulerLostError, ServiceError
from shared.limits import SamplingParams
from tests.support.exchange_peer import Row, column, make_end, make_outputs, read_column


class Sink:
    """Receives tokens; its request is stopped at `stop_at` tokens."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.token_ids: list[int] = []
        self.ends: list[exchange_pb2.RequestEnd] = []
        self.error: ServiceError | None = None

    @property
    def num_received(self) -> int:
        return len(self.token_ids)

    def begin(self, num_cached_tokens: int) -> None:
        self.num_cached_tokens = num_cached_tokens

    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        self.token_ids += token_ids
        if end is not None:
            self.ends.append(end)
            return None
        return self.stop_at if self.stop_at is not None and self.num_received >= self.stop_at else None

    def fail(self, error: ServiceError) -> None:
        self.error = error


def make_request(request_id: str = "r", num_prompt_tokens: int = 3) -> ResolvedRequest:
    prompt = np.arange(num_prompt_tokens, dtype=np.int32)
    return ResolvedRequest(request_id, prompt, SamplingParams(max_tokens=4), ())


async def next_message(link: ExchangeLink) -> exchange_pb2.ExchangeRequest:
    return await anext(link.messages())


async def test_a_submit_carries_every_resolved_parameter() -> None:
    link = ExchangeLink()
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
    handle = link.submit(ResolvedRequest("id", np.array([9, 8], np.int32), sampling, ("x",)), Sink())
    assert await next_message(link) == exchange_pb2.ExchangeRequest(
        submits=[
            exchange_pb2.Submit(
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
            )
        ]
    )


async def test_what_piles_up_goes_up_in_one_message() -> None:
    link = ExchangeLink()
    stopped, aborted = (link.submit(make_request(name), Sink(stop_at=2)) for name in "ab")
    await next_message(link)
    link.submit(make_request("c"), Sink())
    link.submit(make_request("d"), Sink())
    link.on_outputs(make_outputs(Row(stopped, 0, [1, 1])))
    link.abort(aborted)
    message = await next_message(link)
    assert [submit.request_id for submit in message.submits] == ["c", "d"]
    assert list(message.stop_ats) == [exchange_pb2.StopAt(handle=stopped, num_tokens=2)]
    assert read_column(message.abort_handles) == [aborted]


async def test_a_request_aborted_before_it_was_sent_is_not_sent() -> None:
    link = ExchangeLink()
    link.abort(link.submit(make_request("gone"), Sink()))
    link.submit(make_request("stays"), Sink())
    message = await next_message(link)
    assert [submit.request_id for submit in message.submits] == ["stays"]
    assert message.abort_handles == b""


async def test_submits_of_long_prompts_go_in_several_messages() -> None:
    link = ExchangeLink()
    for name in "abc":
        link.submit(make_request(name, num_prompt_tokens=1_500_000), Sink())
    sent = [[submit.request_id for submit in (await next_message(link)).submits] for _ in range(2)]
    assert sent == [["a", "b"], ["c"]]


async def test_handles_are_never_used_twice() -> None:
    link = ExchangeLink()
    handles = []
    for _ in range(3):
        handles.append(link.submit(make_request(), Sink()))
        link.abort(handles[-1])
    assert len(set(handles)) == 3


def test_rows_and_ends_reach_their_receivers() -> None:
    link = ExchangeLink()
    first, second = Sink(), Sink()
    handles = [link.submit(make_request(), sink) for sink in (first, second)]
    end = make_end(handles[0], common_pb2.FINISH_REASON_MAX_TOKENS, 3)
    link.on_outputs(make_outputs(Row(handles[1], 0, [7]), Row(handles[0], 0, [1, 2, 3]), ends=[end]))
    assert (first.token_ids, first.ends) == ([1, 2, 3], [end])
    assert (second.token_ids, second.ends) == ([7], [])


def test_an_end_may_come_without_tokens() -> None:
    link = ExchangeLink()
    sink = Sink()
    end = make_end(link.submit(make_request(), sink), common_pb2.FINISH_REASON_MAX_TOKENS, 0)
    link.on_outputs(make_outputs(ends=[end]))
    assert sink.ends == [end]


async def test_what_comes_for_requests_that_are_over_is_dropped() -> None:
    link = ExchangeLink()
    ended, stopped, aborted = Sink(), Sink(stop_at=1), Sink()
    handles = [link.submit(make_request(), sink) for sink in (ended, stopped, aborted)]
    link.on_outputs(make_outputs(ends=[make_end(handles[0], common_pb2.FINISH_REASON_EOS, 0)]))
    link.on_outputs(make_outputs(Row(handles[1], 0, [5])))
    link.abort(handles[2])
    ends = [make_end(handle, common_pb2.FINISH_REASON_EOS, 9) for handle in handles]
    link.on_outputs(make_outputs(*(Row(handle, 4, [6]) for handle in (*handles, 999)), ends=ends))
    assert (ended.token_ids, stopped.token_ids, aborted.token_ids) == ([], [5], [])
    assert (len(ended.ends), stopped.ends, aborted.ends) == (1, [], [])


async def test_aborting_a_request_that_ended_sends_nothing() -> None:
    link = ExchangeLink()
    handle = link.submit(make_request(), Sink())
    await next_message(link)
    link.on_outputs(make_outputs(ends=[make_end(handle, common_pb2.FINISH_REASON_EOS, 0)]))
    link.abort(handle)
    link.submit(make_request("next"), Sink())
    assert (await next_message(link)).abort_handles == b""


def test_a_closed_link_ends_its_requests_and_takes_no_more() -> None:
    link = ExchangeLink()
    sink = Sink()
    link.submit(make_request(), sink)
    link.close(SchedulerLostError("lost"))
    assert isinstance(sink.error, SchedulerLostError)
    with pytest.raises(SchedulerLostError):
        link.submit(make_request(), Sink())


async def test_a_closed_link_has_no_more_messages() -> None:
    link = ExchangeLink()
    link.submit(make_request(), Sink())
    link.close(SchedulerLostError("lost"))
    assert [message async for message in link.messages()] == []


def outputs(**columns: Sequence[int]) -> exchange_pb2.Outputs:
    """Outputs of one row, but for the columns given."""
    row: dict[str, Sequence[int]] = {"handles": [1], "first_indexes": [0], "counts": [1], "token_ids": [5]}
    message = exchange_pb2.Outputs()
    for name, values in (row | columns).items():
        setattr(message, name, column(values))
    return message


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
def test_outputs_that_make_no_sense_are_refused(message: exchange_pb2.Outputs) -> None:
    link = ExchangeLink()
    link.submit(make_request(), Sink())
    with pytest.raises(ExchangeError):
        link.on_outputs(message)
