from __future__ import annotations

import pytest

from shared.network.probes import Probes


def test_a_process_is_ready_once_it_has_started_and_nothing_is_in_its_way() -> None:
    probes = Probes("loading")
    probes.set_obstacle("unlinked")
    assert (probes.why_not_started, probes.why_not_ready) == ("loading", "loading")
    probes.set_started()
    assert (probes.why_not_started, probes.why_not_ready) == (None, "unlinked")
    probes.set_obstacle(None)
    assert (probes.why_not_started, probes.why_not_ready) == (None, None)


def test_a_process_that_leaves_has_started_but_is_not_ready_until_it_is_taken_back() -> None:
    probes = Probes("loading")
    probes.set_started()
    probes.is_leaving = True
    assert (probes.why_not_started, probes.why_not_ready) == (None, "leaving")
    probes.is_leaving = False
    assert probes.why_not_ready is None


def test_a_process_that_has_started_waits_for_nothing_again() -> None:
    probes = Probes("loading")
    probes.set_started()
    with pytest.raises(AssertionError):
        probes.set_waiting("others")
