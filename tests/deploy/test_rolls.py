"""What one replica more restarts: the pods whose template changes."""

from __future__ import annotations

import pytest

from tests.support.deploy.chart import KUBERNETES, LEADER_WORKER_SETS, Tree, find, render
from tests.support.deploy.chart_values import values
from tests.support.deploy.workloads import args_of, flag

ONE_POD = {"kind": "StatefulSet"}
SETS = {"kind": "StatefulSet", "tp": 8, "nodes": 2}
GROUPS = {"kind": "LeaderWorkerSet"}
WIDE_GROUPS = {"kind": "LeaderWorkerSet", "tp": 8, "nodes": 2}
DEPLOYMENT = {"autoscaling": {"enabled": True}}
SHAPES: dict[str, Tree] = {
    "one pod": ONE_POD,
    "sets": SETS,
    "groups": GROUPS,
    "wide groups": WIDE_GROUPS,
    "deployment": DEPLOYMENT,
}
SCHEDULERS = "StatefulSet/rel-main-scheduler"


def templates(workers: Tree, dp: int, *, kubernetes: str = KUBERNETES, **cell: Tree) -> dict[str, Tree]:
    """The pod template of each workload of a cell with so many replicas, by `KIND/NAME`."""
    given = values({**cell, "workers": {**workers, "dp": dp}})
    objects = render(values=given, apis=[LEADER_WORKER_SETS], kubernetes=kubernetes)
    return {
        f"{kind}/{each['metadata']['name']}": each["spec"].get("template")
        or each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        for kind in ("Deployment", "StatefulSet", "LeaderWorkerSet")
        for each in find(objects, kind)
    }


def rolled(before: dict[str, Tree], after: dict[str, Tree]) -> set[str]:
    """What an upgrade replaces pods of: workloads that both have, with other templates."""
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}


@pytest.mark.parametrize("kubernetes", ["1.28.0", KUBERNETES])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_replica_more_restarts_no_pod(shape: str, kubernetes: str) -> None:
    first = templates(SHAPES[shape], 1, kubernetes=kubernetes)
    for dp in (2, 3, 7):
        more = templates(SHAPES[shape], dp, kubernetes=kubernetes)
        assert first.keys() <= more.keys()
        assert rolled(first, more) == set()


@pytest.mark.parametrize("discovery", ["dns", "kubernetes"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "deployment"])
def test_each_further_eight_replicas_restart_the_schedulers_alone(shape: str, discovery: str) -> None:
    few, many, more = (templates(SHAPES[shape], dp, scheduler={"discovery": discovery}) for dp in (7, 8, 15))
    assert rolled(few, many) == {SCHEDULERS}
    assert rolled(many, more) == set()


@pytest.mark.parametrize("dp", [1, 7, 8, 9, 16, 100])
def test_schedulers_have_a_place_to_spare_for_a_pod_that_terminates(dp: int) -> None:
    objects = render(values=values({"workers": {"dp": dp}}))
    places = int(flag(args_of(objects, "StatefulSet", "-scheduler"), "max-dp"))
    assert dp < places <= dp + 8


@pytest.mark.parametrize("shape", [ONE_POD, GROUPS, WIDE_GROUPS], ids=["one pod", "groups", "wide groups"])
def test_with_a_list_one_replica_more_restarts_all_workers_and_both_schedulers(shape: Tree) -> None:
    before, after = (templates(shape, dp, scheduler={"discovery": "static"}) for dp in (2, 3))
    assert rolled(before, after) == {SCHEDULERS, f"{shape['kind']}/rel-main-worker"}


@pytest.mark.parametrize("kind", ["StatefulSet", "LeaderWorkerSet"])
def test_another_dp_of_a_coupled_cell_restarts_its_ranks_and_both_schedulers(kind: str) -> None:
    before, after = (templates({"kind": kind, "ep": True}, dp) for dp in (2, 3))
    assert rolled(before, after) == {SCHEDULERS, f"{kind}/rel-main-worker"}


@pytest.mark.parametrize("kind", ["StatefulSet", "LeaderWorkerSet"])
def test_a_cell_that_becomes_coupled_has_a_list(kind: str) -> None:
    objects = render(values=values({"workers": {"kind": kind, "ep": True, "dp": 2}}), apis=[LEADER_WORKER_SETS])
    assert flag(args_of(objects, "StatefulSet", "-scheduler"), "workers").count(",") == 1


@pytest.mark.parametrize(
    "change", [{"replicas": 3}, {"autoscaling": {"enabled": True}}, {"autoscaling": {"maxReplicas": 20}}]
)
def test_more_tokenizers_restart_nothing(change: Tree) -> None:
    assert rolled(templates(ONE_POD, 1), templates(ONE_POD, 1, tokenizer=change)) == set()


def test_more_places_for_an_autoscaler_restart_the_schedulers_alone() -> None:
    wider = {"autoscaling": {"enabled": True, "maxReplicas": 20}}
    assert rolled(templates(DEPLOYMENT, 1), templates(wider, 1)) == {SCHEDULERS}
