"""The attach protocol, model-checked on the classes that the scheduler and the workers run.

The model covers every order of messages between schedulers and groups, with messages lost, late and repeated.

Safety, never:
- a step of an older epoch is launched after a newer one was answered;
- coupled groups run the collectives of different steps;
- a scheduler continues without a group of its domain, exits in favour of a dead rival, or takes a group that it must
  wait for;
- a served cell stops being served without a fault.

Reachability: from every state the cell can become served.

Liveness: in every fair run without further faults and with one scheduler alive, the cell becomes served.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.attach.actors import ProtocolError
from tests.simulation.attach.search import COUPLED, SEARCHES, SPLIT, WIDEST_SEARCHES, Search
from tests.simulation.planted.attach import ATTACH_BUGS, AttachBug

# Fewer states than any search has; a search with fewer would be cut off by its bounds before it covers its case.
MIN_STATES = 1000


def searches() -> list[Any]:
    """All but the widest; those of a quarter of a million states are left to `make test-slow` and `make proofs`."""
    marks = {COUPLED: pytest.mark.slow, SPLIT: pytest.mark.proof}
    return [pytest.param(search, marks=marks.get(search, ()), id=name) for name, search in SEARCHES.items()]


@pytest.mark.parametrize("search", searches())
def test_whatever_the_order_nothing_forbidden_happens_and_the_cell_is_served(search: Search) -> None:
    result = search.run()
    assert result.num_moves > result.num_states > MIN_STATES


# Measured: 21 minutes at the lowest priority.
@pytest.mark.proof
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("search", WIDEST_SEARCHES.values(), ids=WIDEST_SEARCHES.keys())
def test_with_more_faults_nothing_forbidden_happens_either(search: Search) -> None:
    search.run()


# Their shortest way to a violation is found late.
LATE_BUGS = (
    "last_steps_are_not_compared",
    "no_scheduler_gives_way",
    "refusals_raise_the_epoch",
    "streams_are_not_asked_whose_they_are",
    "the_first_refusal_ends_a_scheduler",
)


def bugs() -> list[Any]:
    """All of them; the late ones are left to `make proofs`."""
    assert {bug.name for bug in ATTACH_BUGS} > set(LATE_BUGS)
    marks = {True: pytest.mark.proof, False: pytest.mark.slow}
    return [pytest.param(bug, marks=marks[bug.name in LATE_BUGS], id=bug.name) for bug in ATTACH_BUGS]


@pytest.mark.parametrize("bug", bugs())
def test_a_planted_bug_is_seen(bug: AttachBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(ProtocolError):
        bug.search.run()
