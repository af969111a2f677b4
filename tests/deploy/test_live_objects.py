"""`helm upgrade` beside what runs: numbers that are an autoscaler's are kept, and workers are not replaced unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.deploy.chart import CHART, LEADER_WORKER_SETS, RenderError, Tree, find, helm, parse, render
from tests.support.deploy.chart_values import values, workers
from tests.support.deploy.live_cluster import live_cluster
from tests.support.deploy.workloads import args_of, template_of

AUTOSCALED_WORKERS = {"scheduler": {"discovery": "dns"}, "workers": {"autoscaling": {"enabled": True}}}


def render_beside(live: list[Tree], given: Tree, folder: Path, *, major: int = 4, has_sets: bool = False) -> list[Tree]:
    """The objects for values in a cluster in which others run.

    Raises:
        RenderError: Helm refused the values.
    """
    path = folder / "values.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    with live_cluster(live, folder, has_sets=has_sets) as kubeconfig:
        flags = ["--dry-run=server", "--disable-openapi-validation", f"--kubeconfig={kubeconfig}", f"--values={path}"]
        return parse(helm("template", "rel", str(CHART), "-n", "ns", *flags, major=major))


def scaled(objects: list[Tree], kind: str, name: str, replicas: int) -> list[Tree]:
    """The objects after an autoscaler, or a person, has changed a number."""
    (found,) = find(objects, kind, name)
    found["spec"]["replicas"] = replicas
    return objects


@pytest.mark.parametrize("major", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("replicas", [0, 3, 9])
def test_switching_an_autoscaler_on_keeps_the_number_of_tokenizers(tmp_path: Path, replicas: int, major: int) -> None:
    live = scaled(render(values=values({"tokenizer": {"replicas": 3}})), "Deployment", "-tokenizer", replicas)

    objects = render_beside(live, values({"tokenizer": {"autoscaling": {"enabled": True}}}), tmp_path, major=major)

    (deployment,) = find(objects, "Deployment", "-tokenizer")
    assert deployment["spec"]["replicas"] == replicas


@pytest.mark.parametrize("replicas", [0, 1, 6])
def test_an_upgrade_keeps_the_number_of_workers_that_an_autoscaler_chose(tmp_path: Path, replicas: int) -> None:
    live = scaled(render(values=values(AUTOSCALED_WORKERS)), "Deployment", "-worker", replicas)

    (deployment,) = find(render_beside(live, values(AUTOSCALED_WORKERS), tmp_path), "Deployment", "-worker")

    assert deployment["spec"]["replicas"] == replicas


SETS = values({"workers": {"kind": "StatefulSet", "dp": 4}})
SETS_LISTED = values({"scheduler": {"discovery": "static"}})
SET_PER_DOMAIN = values({"workers": {"kind": "StatefulSet", "tp": 4, "nodes": 2}})
GROUPS = values({"workers": {"kind": "LeaderWorkerSet", "dp": 4}})


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (SETS, values(AUTOSCALED_WORKERS), "a Deployment would take the place of the StatefulSet"),
        (values(AUTOSCALED_WORKERS), SETS, "a StatefulSet would take the place of the Deployment"),
        (SETS, GROUPS, "a LeaderWorkerSet would take the place of the StatefulSet"),
        (GROUPS, SETS, "a StatefulSet would take the place of the LeaderWorkerSet"),
        (SETS, SET_PER_DOMAIN, "a StatefulSets would take the place of the StatefulSet"),
        (SET_PER_DOMAIN, SETS, "a StatefulSet would take the place of the StatefulSets"),
    ],
)
def test_workers_of_another_kind_need_a_word(before: Tree, after: Tree, named: str, tmp_path: Path) -> None:
    live = render(values=before, apis=[LEADER_WORKER_SETS])
    with pytest.raises(RenderError, match=rf"cells\[main\]\.workers: {named}.*add a second cell.*replaceKind: true"):
        render_beside(live, after, tmp_path, has_sets=True)

    (cell,) = after["cells"]
    asked = {**after, "cells": [{**cell, "workers": {**cell["workers"], "replaceKind": True}}]}
    assert render_beside(live, asked, tmp_path, has_sets=True)


@pytest.mark.parametrize("before", [SETS, GROUPS, SET_PER_DOMAIN], ids=["set", "groups", "sets"])
def test_auto_keeps_what_runs_when_the_cluster_gets_or_loses_leader_worker_sets(before: Tree, tmp_path: Path) -> None:
    (cell,) = before["cells"]
    kind = cell["workers"]["kind"]
    live = render(values=before, apis=[LEADER_WORKER_SETS])
    auto = {**before, "cells": [{**cell, "workers": {**cell["workers"], "kind": "auto"}}]}

    objects = render_beside(live, auto, tmp_path, has_sets=True)

    assert {each["metadata"]["name"] for each in find(objects, kind)} == {
        each["metadata"]["name"] for each in find(live, kind)
    }


def test_the_sets_that_a_leader_worker_set_makes_are_its_own(tmp_path: Path) -> None:
    live = render(values=GROUPS, apis=[LEADER_WORKER_SETS])
    (groups,) = find(live, "LeaderWorkerSet")
    name = groups["metadata"]["name"]
    made = [
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": each}} for each in (name, f"{name}-0")
    ]

    assert find(render_beside([*live, *made], GROUPS, tmp_path, has_sets=True), "LeaderWorkerSet")


def test_a_cell_that_is_new_begins_as_at_an_install(tmp_path: Path) -> None:
    given = values({"tokenizer": {"autoscaling": {"enabled": True, "minReplicas": 4}}, **AUTOSCALED_WORKERS})

    objects = render_beside([], given, tmp_path)

    assert find(objects, "Deployment", "-tokenizer")[0]["spec"]["replicas"] == 4
    assert find(objects, "Deployment", "-worker")[0]["spec"]["replicas"] == 1


def test_a_number_that_nobody_scales_is_the_value(tmp_path: Path) -> None:
    live = scaled(render(values=workers(dp=2)), "Deployment", "-tokenizer", 7)

    (deployment,) = find(render_beside(live, workers(dp=2), tmp_path), "Deployment", "-tokenizer")

    assert deployment["spec"]["replicas"] == 2


def discovery_of(objects: list[Tree]) -> str:
    """How a cell's schedulers find its workers."""
    args = args_of(objects, "StatefulSet", "-scheduler")
    found = [arg.partition("=")[2] for arg in args if arg.startswith("--discovery=")]
    return found[0] if found else "static"


@pytest.mark.parametrize("major", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("discovery", ["static", "dns", "kubernetes"])
def test_auto_keeps_how_workers_are_found(discovery: str, major: int, tmp_path: Path) -> None:
    sidecar = {"podTemplate": {"spec": {"containers": [{"name": "other", "image": "i", "args": ["--verbose"]}]}}}
    live = render(values=values({"scheduler": {"discovery": discovery, **sidecar}, "workers": {"dp": 2}}))

    objects = render_beside(live, values({"scheduler": sidecar, "workers": {"dp": 2}}), tmp_path, major=major)

    assert discovery_of(objects) == discovery
    assert template_of(objects, "StatefulSet", "-worker") == template_of(live, "StatefulSet", "-worker")
    assert template_of(objects, "StatefulSet", "-scheduler") == template_of(live, "StatefulSet", "-scheduler")


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (workers(dp=2, ep=True), workers(dp=2), "static"),
        (workers(dp=2), workers(dp=2, ep=True), "static"),
        (SETS_LISTED, workers(autoscaling={"enabled": True}, replaceKind=True), "dns"),
        (SETS_LISTED, values({"scheduler": {"discovery": "dns"}}), "dns"),
    ],
    ids=["no longer coupled", "coupled", "autoscaled", "asked for"],
)
def test_how_workers_are_found_follows_what_the_cell_becomes(
    before: Tree, after: Tree, found: str, tmp_path: Path
) -> None:
    assert discovery_of(render_beside(render(values=before), after, tmp_path)) == found
