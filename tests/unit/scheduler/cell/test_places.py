"""Places for endpoints that come and go: which one gets which, for how long, and what the cell says about it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.cell.events import (
    Action,
    DrainRank,
    Endpoint,
    EndpointsFound,
    LinkDomain,
    ReleaseDomain,
    TimePassed,
    UnlinkDomain,
)
from services.scheduler.cell.state import RankState
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.ids import DpRank
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver

PROMPT = [11, 12, 13]
A, B, C = (Endpoint(f"10.0.0.{number}:50053") for number in (1, 2, 3))
LEAVING_A = Endpoint(A.address, is_ready=False, is_terminating=True)


def make_driver(max_dp: int = 2, *, drain_s: float = 30.0, zone: str | None = None) -> EngineDriver:
    topology = CellTopology(max_dp, is_dynamic=True, preferred_zone=zone)
    return EngineDriver(topology=topology, policy=SchedulerPolicy(drain_s=drain_s), attach=False)


def find(driver: EngineDriver, *endpoints: Endpoint) -> list[Action]:
    return driver.on_event(EndpointsFound(endpoints))


def wait(driver: EngineDriver, seconds: float) -> list[Action]:
    driver.now += seconds
    return driver.on_event(TimePassed())


def ranks(driver: EngineDriver) -> list[RankState]:
    return [rank for rank in driver.engine.state().ranks if not rank.is_vacant]


def links(actions: list[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, LinkDomain | UnlinkDomain)]


def test_places_are_vacant_at_first_and_serve_when_an_endpoint_is_attached() -> None:
    driver = make_driver()
    state = driver.engine.state()
    assert (state.ready, state.num_blocks, ranks(driver)) == (False, 0, [])
    find(driver, A)
    driver.attach(0)
    driver.submit(1, PROMPT)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 8)


def test_an_endpoint_gets_the_lowest_free_place_and_keeps_it() -> None:
    driver = make_driver(3)
    assert find(driver, C, A) == [LinkDomain(0, A.address), LinkDomain(1, C.address)]
    assert find(driver, A, B, C) == [LinkDomain(2, B.address)]
    assert links(find(driver, B, C)) == [UnlinkDomain(0)]
    assert links(find(driver, A, B, C)) == [LinkDomain(0, A.address)]


def test_endpoints_that_are_ready_come_first_and_the_others_wait_for_a_place() -> None:
    driver = make_driver(1)
    assert find(driver, Endpoint(A.address, is_ready=False), B) == [LinkDomain(0, B.address)]
    assert driver.engine.num_unplaced_endpoints == 1
    assert find(driver, A) == [UnlinkDomain(0), LinkDomain(0, A.address)]
    assert driver.engine.num_unplaced_endpoints == 0


def in_zone(endpoint: Endpoint, zone: str | None, *, is_ready: bool = True) -> Endpoint:
    return Endpoint(endpoint.address, is_ready=is_ready, zone=zone)


def test_endpoints_of_the_preferred_zone_get_places_first() -> None:
    driver = make_driver(1, zone="b")
    assert find(driver, in_zone(A, "a"), in_zone(B, None), in_zone(C, "b")) == [LinkDomain(0, C.address)]
    assert driver.engine.num_unplaced_endpoints == 2


def test_endpoints_of_other_zones_get_the_places_that_are_left() -> None:
    driver = make_driver(3, zone="b")
    found = find(driver, in_zone(A, "a"), in_zone(B, None), in_zone(C, "b"))
    assert found == [LinkDomain(0, C.address), LinkDomain(1, A.address), LinkDomain(2, B.address)]


def test_an_endpoint_that_is_ready_comes_before_one_of_the_preferred_zone() -> None:
    driver = make_driver(1, zone="b")
    assert find(driver, in_zone(A, "a"), in_zone(B, "b", is_ready=False)) == [LinkDomain(0, A.address)]


def test_an_endpoint_keeps_its_place_when_one_of_the_preferred_zone_comes() -> None:
    driver = make_driver(1, zone="b")
    find(driver, in_zone(A, "a"))
    assert find(driver, in_zone(A, "a"), in_zone(B, "b"), in_zone(C, "a")) == []
    assert links(find(driver, in_zone(B, "b"), in_zone(C, "a"))) == [UnlinkDomain(0), LinkDomain(0, B.address)]


def test_without_a_preferred_zone_all_zones_are_equal() -> None:
    driver = make_driver(1)
    assert find(driver, in_zone(B, None), in_zone(A, "a")) == [LinkDomain(0, A.address)]


def test_a_terminating_endpoint_that_was_never_seen_gets_no_place() -> None:
    driver = make_driver()
    assert find(driver, LEAVING_A, B) == [LinkDomain(0, B.address)]
    assert driver.engine.num_unplaced_endpoints == 0


def test_an_endpoint_that_is_not_ready_keeps_its_work_and_gets_more() -> None:
    driver = make_driver(1)
    find(driver, A)
    driver.attach(0)
    driver.submit(1, PROMPT)
    assert find(driver, Endpoint(A.address, is_ready=False)) == []
    driver.submit(2, PROMPT)
    driver.run()
    assert [driver.choices[1, handle].tokens for handle in (1, 2)] == [expected_completion(PROMPT, 0, 8)] * 2


@pytest.mark.parametrize("left", [(LEAVING_A, B), (B,)], ids=["terminating", "gone"])
def test_a_withdrawn_endpoint_finishes_its_requests_and_gets_no_more(left: tuple[Endpoint, ...]) -> None:
    driver = make_driver()
    find(driver, A, B)
    driver.attach(0)
    driver.submit(1, PROMPT)
    driver.attach(1)
    assert links(find(driver, *left)) == []
    assert ranks(driver)[0].is_draining
    driver.submit(2, PROMPT)
    assert ranks(driver)[1].num_running == 1
    driver.run()
    assert [type(action) for action in driver.actions if isinstance(action, ReleaseDomain | UnlinkDomain)] == [
        ReleaseDomain,
        UnlinkDomain,
    ]
    for handle in (1, 2):
        assert driver.choices[1, handle].tokens == expected_completion(PROMPT, 0, 8)
    state = driver.engine.state()
    assert (state.counters.num_lost_epochs, state.num_suspects) == (0, 0)


def test_what_does_not_finish_in_time_continues_elsewhere() -> None:
    driver = make_driver(drain_s=5.0)
    find(driver, A, B)
    driver.attach(0)
    driver.submit(1, PROMPT, max_tokens=12)
    driver.attach(1)
    find(driver, B)
    driver.step(0)
    driver.now += 5.0
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 12)
    assert [rank.rank for rank in ranks(driver)] == [1]


def test_a_place_is_kept_until_the_endpoint_is_gone_and_its_stream_closed() -> None:
    driver = make_driver(1)
    find(driver, A)
    driver.attach(0)
    driver.submit(1, PROMPT)
    # Its stream is open.
    assert links(find(driver, B)) == []
    assert links(find(driver, LEAVING_A, B)) == []
    driver.run()
    # The stream is closed, but the endpoint is still there.
    assert links(driver.actions)[-1] == UnlinkDomain(0)
    assert links(find(driver, LEAVING_A, B)) == []
    assert links(find(driver, B)) == [LinkDomain(0, B.address)]


def test_the_next_endpoint_gets_the_place_when_the_last_request_of_one_that_is_gone_ends() -> None:
    driver = make_driver(1)
    find(driver, A)
    driver.attach(0)
    driver.submit(1, PROMPT)
    find(driver, B)
    driver.run()
    assert links(driver.actions) == [LinkDomain(0, A.address), UnlinkDomain(0), LinkDomain(0, B.address)]


def test_an_endpoint_that_returns_before_its_stream_closed_has_never_been_away() -> None:
    driver = make_driver(1)
    find(driver, A)
    driver.attach(0)
    driver.submit(1, PROMPT)
    find(driver)
    assert ranks(driver)[0].is_draining
    assert find(driver, A) == []
    assert not ranks(driver)[0].is_draining
    driver.submit(2, PROMPT)
    driver.run()
    assert links(driver.actions) == [LinkDomain(0, A.address)]
    assert driver.choices[1, 2].end is not None


def test_a_broken_stream_of_a_withdrawn_endpoint_accuses_no_request() -> None:
    driver = make_driver()
    find(driver, A, B)
    driver.attach(0)
    driver.submit(1, PROMPT)
    find(driver, B)
    actions = driver.lose(0)
    assert links(actions) == [UnlinkDomain(0)]
    driver.attach(1)
    driver.run()
    state = driver.engine.state()
    assert (state.num_suspects, state.counters.num_lost_epochs) == (0, 0)
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 8)


def test_a_worker_that_crashes_is_linked_still_because_its_endpoint_is_there() -> None:
    driver = make_driver()
    find(driver, A)
    driver.attach(0)
    assert links(driver.lose(0)) == []
    assert [rank.is_attached for rank in ranks(driver)] == [False]


def test_an_endpoint_that_has_gone_no_longer_limits_requests() -> None:
    driver = make_driver()
    find(driver, A, B)
    driver.attach(0, num_blocks=2)
    driver.attach(1)
    assert driver.engine.facts.limits is not None
    assert driver.engine.facts.limits.num_pool_tokens == 32
    find(driver, B)
    assert driver.engine.facts.limits.num_pool_tokens == 64 * 16


def test_the_limits_stay_when_the_last_endpoint_has_gone() -> None:
    driver = make_driver()
    find(driver, A)
    driver.attach(0)
    find(driver)
    limits, state = driver.engine.facts.limits, driver.engine.state()
    assert limits is not None
    assert (limits.num_pool_tokens, state.ready, state.num_blocks) == (64 * 16, False, 0)
    driver.submit(1, PROMPT)
    find(driver, B)
    driver.attach(0)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 8)


def test_an_operators_drain_ends_with_the_endpoint() -> None:
    driver = make_driver(1)
    find(driver, A)
    driver.attach(0)
    driver.on_event(DrainRank(DpRank(0)))
    find(driver, B)
    assert [rank.is_draining for rank in ranks(driver)] == [False]


def test_a_request_that_only_a_lost_rank_could_hold_ends_instead_of_blocking_the_queue() -> None:
    driver = make_driver()
    find(driver, A, B)
    driver.attach(0)
    driver.submit(1, PROMPT, max_tokens=100)
    driver.attach(1, num_blocks=2)
    driver.lose(0)
    end = driver.choices[1, 1].end
    assert end is not None
    assert end.error is not None
    assert end.error.reason == "KV_CAPACITY_EXCEEDED"


class ComingAndGoing(RuleBasedStateMachine):
    """Endpoints, streams and requests change in any order; every request ends with the right tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = make_driver(3, drain_s=4.0)
        self.linked: dict[int, str] = {}
        self.num_seen = 0
        self.num_requests = 0
        self.found: tuple[Endpoint, ...] = ()

    @rule(endpoints=st.dictionaries(st.integers(1, 5), st.tuples(st.booleans(), st.booleans()), max_size=5))
    def discover(self, endpoints: dict[int, tuple[bool, bool]]) -> None:
        self.found = tuple(Endpoint(f"10.0.0.{number}:1", *flags) for number, flags in endpoints.items())
        find(self.driver, *self.found)

    @precondition(lambda self: self.unattached())
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        self.driver.attach(data.draw(st.sampled_from(self.unattached())))

    @precondition(lambda self: self.driver.epochs)
    @rule(data=st.data())
    def break_stream(self, data: st.DataObject) -> None:
        self.driver.lose(data.draw(st.sampled_from(sorted(self.driver.epochs))))

    @rule()
    def submit(self) -> None:
        self.num_requests += 1
        self.driver.submit(self.num_requests, PROMPT)

    @precondition(lambda self: any(self.driver.sent_to.values()))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.driver.step(data.draw(st.sampled_from([rank for rank, sent in self.driver.sent_to.items() if sent])))

    @rule()
    def let_time_pass(self) -> None:
        wait(self.driver, 3.0)

    @invariant()
    def the_links_are_those_of_the_places(self) -> None:
        for action in self.driver.actions[self.num_seen :]:
            if isinstance(action, LinkDomain):
                assert action.domain not in self.linked
                self.linked[action.domain] = action.address
            elif isinstance(action, UnlinkDomain):
                assert action.domain not in self.driver.epochs
                del self.linked[action.domain]
        self.num_seen = len(self.driver.actions)
        assert len(set(self.linked.values())) == len(self.linked)
        assert self.driver.epochs.keys() <= self.linked.keys()
        wanted = [endpoint.address for endpoint in self.found if not endpoint.is_terminating]
        assert len(self.linked) == 3 or set(wanted) <= set(self.linked.values()) | self.held()

    def unattached(self) -> list[int]:
        return sorted(self.linked.keys() - self.driver.epochs.keys())

    def held(self) -> set[str]:
        """Endpoints that wait although a place has no link: all places are held by others."""
        taken = [rank for rank in self.driver.engine.state().ranks if not rank.is_vacant]
        return {endpoint.address for endpoint in self.found} if len(taken) == 3 else set()

    def teardown(self) -> None:
        self.found = (A,)
        find(self.driver, A)
        self.the_links_are_those_of_the_places()
        for _ in range(20):
            for domain in self.unattached():
                self.driver.attach(domain)
            self.driver.run()
            wait(self.driver, 5.0)
            self.the_links_are_those_of_the_places()
        for handle in range(1, self.num_requests + 1):
            choice = self.driver.choices[1, handle]
            assert choice.end is not None
            assert choice.tokens == expected_completion(PROMPT, 0, 8)[: len(choice.tokens)]


ComingAndGoing.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestComingAndGoing = ComingAndGoing.TestCase
