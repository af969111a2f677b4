"""An operator's bound on how long requests wait for lost workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cell.events import DrainRank, TimePassed
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.errors import ErrorCode
from shared.ids import DpRank
from tests.support.scheduler.engine_driver import EngineDriver

BOUND_S, BEAT_S = 20.0, 0.75
TWO = CellTopology(dp_size=2)
COUPLED = CellTopology(dp_size=2, is_coupled=True)
PROMPT = list(range(11, 51))


def make_driver(topology: CellTopology | None = None, bound_s: float | None = BOUND_S) -> EngineDriver:
    policy = SchedulerPolicy(max_num_batched_tokens=16, workers_lost_s=bound_s)
    driver = EngineDriver(topology=topology, policy=policy)
    driver.on_event(TimePassed())
    return driver


def wait(driver: EngineDriver, seconds: float) -> None:
    """Let time pass as it does, so that no beat is late."""
    while seconds > 0:
        driver.now += min(seconds, BEAT_S / 2)
        seconds -= BEAT_S / 2
        driver.on_event(TimePassed())


def reason_of(driver: EngineDriver, handle: int) -> str | None:
    """The reason of the error with which a request has ended; None if it has not, or had none."""
    output = driver.choices.get((1, handle))
    if output is None or output.end is None:
        return None
    return None if output.end.error is None else output.end.error.reason


def begin(driver: EngineDriver, handle: int = 1) -> None:
    """A request that has tokens."""
    driver.submit(handle, PROMPT, max_tokens=40)
    while not driver.choices.get((1, handle)) or not driver.choices[1, handle].tokens:
        driver.step()


@pytest.mark.parametrize("topology", [None, COUPLED], ids=["one rank", "coupled"])
def test_what_runs_and_what_waits_ends_when_the_bound_has_passed_and_newcomers_are_refused(
    topology: CellTopology | None,
) -> None:
    driver = make_driver(topology)
    driver.submit(1, PROMPT, max_tokens=40)
    for rank in driver.workers:
        driver.step(rank)
    driver.lose()
    driver.submit(2, PROMPT)
    wait(driver, BOUND_S - 1.0)
    assert [reason_of(driver, handle) for handle in (1, 2)] == [None, None]
    driver.submit(3, PROMPT)
    wait(driver, 1.0 + BEAT_S)
    assert [reason_of(driver, handle) for handle in (1, 2, 3)] == ["WORKERS_LOST", "WORKERS_LOST", None]
    driver.submit(4, PROMPT)
    assert reason_of(driver, 4) == "WORKERS_LOST"
    # What came before the bound passed has all of it to wait.
    wait(driver, BOUND_S - 2.0 - BEAT_S)
    assert reason_of(driver, 3) is None
    wait(driver, 2.0 + BEAT_S)
    assert reason_of(driver, 3) == "WORKERS_LOST"
    assert driver.choices[1, 1].end is not None
    assert driver.choices[1, 1].end.error is not None
    assert driver.choices[1, 1].end.error.code is ErrorCode.UNAVAILABLE
    assert (driver.engine.state().num_suspects, driver.engine.state().num_waiting) == (0, 0)


def test_by_default_requests_wait_for_as_long_as_it_takes() -> None:
    driver = make_driver(bound_s=None)
    driver.submit(1, PROMPT)
    driver.lose()
    wait(driver, 50 * BOUND_S)
    assert reason_of(driver, 1) is None
    driver.attach()
    driver.run()
    assert driver.choices[1, 1].end is not None
    assert driver.choices[1, 1].end.error is None


def test_workers_that_come_back_in_time_begin_a_new_bound() -> None:
    driver = make_driver()
    begin(driver)
    for _ in range(3):
        driver.lose()
        wait(driver, BOUND_S - 1.0)
        driver.attach()
        # Until a decode step clears the request, which was in a crash.
        while driver.engine.state().num_suspects:
            driver.step()
    assert not has_ended(driver, 1)


def test_workers_that_cannot_compute_have_not_come_back() -> None:
    driver = make_driver()
    driver.passes_controls = False
    begin(driver)
    for _ in range(int(BOUND_S / 5) + 1):
        driver.lose()
        wait(driver, 5.0)
        driver.attach()
        # A step is sent, if only a dummy.
        assert any(driver.sent_to.values()) or reason_of(driver, 1)
    assert reason_of(driver, 1) == "WORKERS_LOST"


def test_workers_that_had_nothing_to_compute_were_there() -> None:
    driver = make_driver()
    for _ in range(3):
        driver.lose()
        wait(driver, BOUND_S - 1.0)
        driver.attach()
    driver.lose()
    driver.submit(1, PROMPT)
    assert reason_of(driver, 1) is None


def test_one_rank_that_is_left_is_enough_and_so_are_ranks_that_drain() -> None:
    driver = make_driver(TWO)
    driver.lose(0)
    driver.on_event(DrainRank(DpRank(1)))
    driver.submit(1, PROMPT)
    wait(driver, 3 * BOUND_S)
    assert reason_of(driver, 1) is None


def test_a_scheduler_that_was_stopped_gives_its_workers_the_time_again() -> None:
    driver = make_driver()
    driver.submit(1, PROMPT)
    driver.lose()
    wait(driver, 5.0)
    driver.now += 100.0
    driver.engine.on_event(TimePassed(), driver.now)
    wait(driver, BOUND_S - 6.0)
    assert reason_of(driver, 1) is None
    wait(driver, 1.0 + 2 * BEAT_S)
    assert reason_of(driver, 1) == "WORKERS_LOST"


@given(st.lists(st.tuples(st.sampled_from("slatw"), st.floats(0.0, 1.5 * BOUND_S)), max_size=12))
@settings(max_examples=25, deadline=None)
def test_nothing_ends_sooner_than_the_bound_and_nothing_waits_longer(events: list[tuple[str, float]]) -> None:
    driver = make_driver()
    submitted: dict[int, float] = {}
    # When workers computed last, and when they were lost after that.
    computed_at = lost_at = 0.0
    for number, (kind, seconds) in enumerate(events, start=1):
        if kind == "s":
            driver.submit(number, PROMPT)
            if not has_ended(driver, number):
                submitted[number] = driver.now
            else:
                assert driver.now - computed_at >= BOUND_S, "a newcomer is refused too soon"
        elif kind == "l" and driver.epochs:
            # Workers that had nothing to compute were there until now.
            has_computed = driver.engine._cell.domains[0].num_returned_steps or not driver.sent
            driver.lose()
            if has_computed:
                computed_at = lost_at = driver.now
        elif kind == "a" and not driver.epochs:
            driver.attach()
        elif kind == "t" and driver.sent:
            driver.step()
            computed_at = driver.now
        elif kind == "w":
            for _ in range(int(2 * seconds / BEAT_S)):
                were_there = bool(driver.epochs)
                wait(driver, BEAT_S / 2)
                if were_there and not driver.epochs and not driver.engine._cell.domains[0].has_computed_nothing:
                    # Their step took too long.
                    lost_at = driver.now
                waited = {handle: driver.now - max(at, computed_at) for handle, at in submitted.items()}
                ended = {handle for handle in submitted if has_ended(driver, handle)}
                errors = {handle for handle in ended if reason_of(driver, handle) == "WORKERS_LOST"}
                assert all(waited[handle] >= BOUND_S for handle in errors), "lost too soon"
                late = {key for key, at in submitted.items() if driver.now - max(at, lost_at) > BOUND_S + 2 * BEAT_S}
                assert driver.epochs or late <= ended, "it waits for too long"
                for handle in ended:
                    del submitted[handle]


def has_ended(driver: EngineDriver, handle: int) -> bool:
    output = driver.choices.get((1, handle))
    return output is not None and output.end is not None
