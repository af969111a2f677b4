"""Rendered workloads: their pods and flags."""

from __future__ import annotations

from tests.support.deploy.chart import Tree, find


def template_of(objects: list[Tree], kind: str, name: str) -> Tree:
    """The pod template of the one workload of a kind with this end of its name."""
    (found,) = find(objects, kind, name)
    spec = found["spec"]
    template: Tree = spec["leaderWorkerTemplate"]["workerTemplate"] if kind == "LeaderWorkerSet" else spec["template"]
    return template


def spec_of(objects: list[Tree], kind: str, name: str) -> Tree:
    """The pod's spec in `template_of`."""
    spec: Tree = template_of(objects, kind, name)["spec"]
    return spec


def args_of(objects: list[Tree], kind: str, name: str) -> list[str]:
    """The arguments of its first container."""
    return list(spec_of(objects, kind, name)["containers"][0]["args"])


def flag(args: list[str], name: str) -> str:
    """The value of the one flag of this name."""
    (value,) = [arg.partition("=")[2] for arg in args if arg.startswith(f"--{name}=")]
    return value
