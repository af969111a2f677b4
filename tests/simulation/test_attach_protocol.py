"""The attach protocol, model-checked on the classes that the scheduler and the workers run.

Every order of what schedulers and groups say to each other, with messages that are lost, late and repeated. What must
never happen: a step of an older epoch is launched after a newer one was answered; coupled groups meet in the
collectives of different steps; a scheduler goes on without a group of its domain, goes for a rival that was dead, or
takes what it only has to wait for; a cell that is served is served no longer though nothing went wrong. What must be
possible from wherever they get to: that the cell is served. What must happen in every fair run in which nothing goes
wrong any more and one scheduler lives: that it serves the cell.
"""

from __future__ import annotations

import pytest

from tests.simulation.attach_actors import ProtocolError
from tests.simulation.attach_search import SEARCHES, WIDE_SEARCHES, Search
from tests.simulation.planted_attach_bugs import ATTACH_BUGS, AttachBug

# Fewer states than any search has: less would mean that a bound cuts off what it is for.
MIN_STATES = 1000


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_whatever_the_order_nothing_forbidden_happens_and_the_cell_is_served(search: Search) -> None:
    result = search.run()
    assert result.num_moves > result.num_states > MIN_STATES


@pytest.mark.slow
@pytest.mark.parametrize("search", WIDE_SEARCHES.values(), ids=WIDE_SEARCHES.keys())
def test_with_more_faults_nothing_forbidden_happens_either(search: Search) -> None:
    search.run()


@pytest.mark.slow
@pytest.mark.parametrize("bug", ATTACH_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_seen(bug: AttachBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(ProtocolError):
        bug.search.run()
