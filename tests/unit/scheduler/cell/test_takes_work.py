"""Whether a cell would compute a request that came now, in every state of its ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.cell.events import DrainRank, UndrainRank
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.ids import DpRank
from tests.support.scheduler.engine_driver import EngineDriver

ONE, TWO = CellTopology(), CellTopology(dp_size=2)
COUPLED = CellTopology(dp_size=2, is_coupled=True)
PROMPT = list(range(11, 51))


def drain(driver: EngineDriver, *ranks: int) -> None:
    for rank in ranks:
        driver.on_event(DrainRank(DpRank(rank)))


def undrain(driver: EngineDriver, rank: int) -> None:
    drain(driver, 0, 1)
    driver.on_event(UndrainRank(DpRank(rank)))


def drain_and_lose(driver: EngineDriver) -> None:
    drain(driver, 0)
    driver.lose(1)


def lose_and_attach(driver: EngineDriver) -> None:
    driver.lose()
    driver.attach()


def leave_and_return(driver: EngineDriver) -> None:
    driver.leave()
    driver.attach()


def control(driver: EngineDriver) -> None:
    """A request's crash has made it a suspect, and idle ranks are to show first that they can compute."""
    driver.passes_controls = False
    try_suspect(driver)


def try_suspect(driver: EngineDriver) -> None:
    """It is tried on the first rank whose control has succeeded."""
    driver.submit(1, PROMPT)
    driver.lose()
    driver.attach()
    assert driver.engine.state().num_suspects == 1


def clear_suspect(driver: EngineDriver) -> None:
    driver.submit(1, PROMPT)
    driver.lose()
    driver.attach()
    driver.run()
    assert driver.engine.state().num_suspects == 0


def lose(driver: EngineDriver, *domains: int) -> None:
    for domain in domains:
        driver.lose(domain)


def attach(driver: EngineDriver, *domains: int) -> None:
    for domain in domains:
        driver.attach(domain)


State = tuple[CellTopology, bool, Callable[[EngineDriver], object], bool, bool]
# The topology, whether its domains are attached at first, what happens then; whether workers are held, and take work.
STATES: dict[str, State] = {
    "not attached yet": (ONE, False, lambda driver: None, False, False),
    "attached": (ONE, True, lambda driver: None, True, True),
    "lost": (ONE, True, lose_first := lambda driver: lose(driver, 0), False, False),
    "back": (ONE, True, lose_and_attach, True, True),
    "drained": (ONE, True, lambda driver: drain(driver, 0), True, False),
    "leaving": (ONE, True, lambda driver: (driver.submit(1, PROMPT), driver.leave()), True, False),
    "left and back": (ONE, True, leave_and_return, True, True),
    "control": (ONE, True, control, True, False),
    "trial": (ONE, True, try_suspect, True, False),
    "cleared": (ONE, True, clear_suspect, True, True),
    "one of two attached": (TWO, False, lambda driver: attach(driver, 1), True, True),
    "one of two lost": (TWO, True, lose_first, True, True),
    "both lost": (TWO, True, lambda driver: lose(driver, 0, 1), False, False),
    "one of two drained": (TWO, True, lambda driver: drain(driver, 0), True, True),
    "both drained": (TWO, True, lambda driver: drain(driver, 0, 1), True, False),
    "one drained, the other lost": (TWO, True, drain_and_lose, True, False),
    "one undrained": (TWO, True, lambda driver: undrain(driver, 1), True, True),
    "control on two idle ones": (TWO, True, control, True, False),
    "trial on one of two": (TWO, True, try_suspect, True, True),
    "domain incomplete": (COUPLED, False, lambda driver: None, False, False),
    "domain attached": (COUPLED, True, lambda driver: None, True, True),
    "domain lost": (COUPLED, True, lose_first, False, False),
    "domain drained by one of its ranks": (COUPLED, True, lambda driver: drain(driver, 1), True, False),
    "trial on the domain": (COUPLED, True, try_suspect, True, False),
}


@pytest.mark.parametrize("name", STATES)
def test_a_cell_takes_work_while_any_domain_is_attached_and_open(name: str) -> None:
    topology, attached, reach, holds_workers, takes_work = STATES[name]
    driver = EngineDriver(topology=topology, policy=SchedulerPolicy(max_num_batched_tokens=16), attach=attached)
    reach(driver)
    state = driver.engine.state()
    assert (driver.engine.is_ready, driver.engine.takes_work) == (holds_workers, takes_work)
    assert (state.ready, state.takes_work) == (holds_workers, takes_work)
    # What it says is what it does: a newcomer is sent to a rank, or waits.
    driver.submit(9, PROMPT)
    is_placed = any(seq.handle == 9 and seq.rank is not None for seq in driver.engine._cell.unfinished())
    assert is_placed == takes_work
