"""Requests in flight when schedulers die: the one that kills them is found, and the others are answered."""

from __future__ import annotations

import asyncio
import time

import pytest

from lockstep.v1 import common_pb2
from services.tokenizer.exchange import cell_requests, submit_suspects
from shared.errors import DeadlinePassedError, PoisonRequestError, SchedulerLostError
from shared.ids import RequestHandle
from tests.support.tokenizer.cell_requests import Requests, Sink
from tests.support.tokenizer.exchange_peer import Row, make_end, make_outputs

MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resubmit requests at once, and end a control with the next sign of life."""
    monkeypatch.setattr(submit_suspects, "_SHORTEST_CONTROL_S", 0.0)
    monkeypatch.setattr(submit_suspects, "_LONGEST_CONTROL_S", 0.0)
    monkeypatch.setattr(cell_requests, "LONGEST_JITTER_S", 0.0)


class Deaths:
    """Lets schedulers die, or end in other ways, one after the other."""

    def __init__(self, requests: Requests) -> None:
        self.num_deaths = 0
        # Whether schedulers are heard before they die.
        self.beats = True
        self._requests = requests

    async def die(self, *, is_explained: bool = False, is_same: bool = False) -> None:
        """Lose the stream, and open the next one."""
        self.num_deaths += 1
        died_at = None if is_explained else time.monotonic()
        self._requests.lose_stream(self._requests.last_stream, died_at=died_at)
        self._requests.open_next("same" if is_same else f"instance {self.num_deaths}")
        # Wait until immediate resubmissions are queued.
        await asyncio.sleep(0)
        if self.beats:
            self._requests.note_heard(self._requests.last_stream)


@pytest.mark.usefixtures("no_jitter")
async def test_one_of_200_requests_kills_schedulers_and_only_that_one_fails() -> None:
    requests = Requests()
    sinks = [Sink() for _ in range(200)]
    poison = Sink()
    # Half of them have tokens when the poison request arrives.
    handles = [await requests.begin_request(sink) for sink in sinks]
    requests.deliver(make_outputs(*(Row(handle, 0, [5]) for handle in handles[::2])))
    poisonous = requests.add(poison)
    handle_to_sink = dict(zip(handles, sinks, strict=True))
    deaths = Deaths(requests)
    while poison.error is None or not all(sink.ends for sink in sinks):
        submits = (await requests.next_message()).submits
        if poisonous in {submit.handle for submit in submits}:
            await deaths.die()
            continue
        for submit in submits:
            sink = handle_to_sink[RequestHandle(submit.handle)]
            end = make_end(submit.handle, MAX_TOKENS, len(sink.token_ids) + 1)
            requests.deliver(make_outputs(Row(submit.handle, len(sink.token_ids), [6]), ends=[end]))
    assert isinstance(poison.error, PoisonRequestError)
    assert [sink.error for sink in sinks] == [None] * 200
    assert requests.counters.num_poison_requests == 1
    assert deaths.num_deaths <= 11


@pytest.mark.usefixtures("no_jitter")
@pytest.mark.parametrize(("is_explained", "is_same"), [(True, False), (False, True)])
async def test_a_scheduler_that_gives_a_reason_or_reappears_has_not_died(is_explained: bool, is_same: bool) -> None:
    requests = Requests()
    sink = Sink()
    handle = requests.add(sink)
    deaths = Deaths(requests)
    for _ in range(9):
        assert (await requests.next_submit()).handle == handle
        await deaths.die(is_explained=is_explained, is_same=is_same)
    # The next one has another instance id than the first.
    assert (await requests.next_submit()).handle == handle
    assert sink.error is None


@pytest.mark.usefixtures("no_jitter")
async def test_requests_that_arrive_while_suspects_are_tested_are_submitted_afterwards() -> None:
    requests = Requests()
    suspect = await requests.begin_request(Sink())
    deaths = Deaths(requests)
    await deaths.die()
    await requests.next_submit()
    await deaths.die()
    sink, late = Sink(), Sink()
    fresh = requests.add(sink)
    requests.add(late, deadline_at=time.monotonic() + 0.05)
    assert (await requests.next_submit()).handle == suspect
    await late.failed.wait()
    assert isinstance(late.error, DeadlinePassedError)
    requests.deliver(make_outputs(Row(suspect, 0, [5])))
    assert (await requests.next_submit()).handle == fresh
    assert sink.error is None


@pytest.mark.usefixtures("no_jitter")
async def test_a_suspects_test_ends_with_its_request_or_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_suspects, "SUSPICION_S", 1.0)
    requests = Requests()
    tried, other = [await requests.begin_request(Sink()) for _ in range(2)]
    deaths = Deaths(requests)
    await deaths.die()
    assert len((await requests.next_message()).submits) == 2
    await deaths.die()
    fresh = requests.add(Sink())
    requests.abort(tried)
    assert (await requests.next_submit()).handle == other
    assert (await requests.next_submit()).handle == fresh


@pytest.mark.usefixtures("no_jitter")
async def test_schedulers_that_die_without_requests_too_lose_the_cell_but_blame_nobody() -> None:
    requests = Requests()
    first, second = Sink(), Sink()
    await requests.begin_request(first)
    await requests.begin_request(second)
    deaths = Deaths(requests)
    deaths.beats = False
    while first.error is None:
        await deaths.die()
        # Empties the queue; without submits there is no message.
        requests.last_stream.beat()
        await requests.next_message()
    assert [type(sink.error) for sink in (first, second)] == [SchedulerLostError] * 2
    assert requests.counters.num_poison_requests == 0
    # Each time: two that accuse both, two with one of them alone, and the control.
    assert deaths.num_deaths == 15
    # The cell may serve again.
    assert await requests.begin_request(Sink())
