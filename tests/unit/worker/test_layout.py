from __future__ import annotations

import subprocess
import sys

import pytest

from services.worker.layout import RankLayout


def places(dp_size: int, tp_size: int, *, ep: bool) -> list[RankLayout]:
    """All processes of a cell."""
    return [RankLayout(dp, dp_size, tp, tp_size, ep) for dp in range(dp_size) for tp in range(tp_size)]


def test_members_follow_their_leader_and_coupled_leaders_the_first_one() -> None:
    first = RankLayout(0, 2, 0, 2, has_expert_parallel=True)
    assert first.followers() == {RankLayout(0, 2, 1, 2, True), RankLayout(1, 2, 0, 2, True)}
    assert RankLayout(1, 2, 0, 2, True).followers() == {RankLayout(1, 2, 1, 2, True)}
    assert RankLayout(1, 2, 1, 2, True).followers() == frozenset()


def test_uncoupled_groups_do_not_know_each_other() -> None:
    assert RankLayout(0, 2, 0, 2).followers() == {RankLayout(0, 2, 1, 2)}
    assert [layout.is_alone for layout in places(2, 1, ep=False)] == [True, True]


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 2)])
def test_every_follower_has_exactly_one_leader(dp_size: int, tp_size: int, ep: bool) -> None:
    cell = places(dp_size, tp_size, ep=ep)
    followers = [follower for layout in cell for follower in layout.followers()]
    assert sorted(followers, key=lambda layout: layout.ep_rank) == [layout for layout in cell if layout.follows]
    assert [layout.ep_rank for layout in cell] == list(range(cell[0].ep_size))


@pytest.mark.process
def test_a_process_knows_its_place_before_torch_is_imported() -> None:
    # OpenMP reads its settings when torch is loaded, so nothing imported before may load it.
    code = "import sys, services.worker.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
