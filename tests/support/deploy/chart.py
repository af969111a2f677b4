"""The Helm chart, rendered."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.system.package_tools import tool
from tests.support.system.processes import ROOT

CHART = ROOT / "deploy" / "helm" / "lockstep"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
KUBERNETES = "1.36.0"
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"
"""What a cluster with the CRD says it has."""

# A rendered object, and values: what YAML can hold.
Tree = dict[str, Any]


class RenderError(Exception):
    """Helm refused the values; the text is its own."""


@cache
def helm(*args: str, major: int = 4, values: str | None = None) -> str:
    """Run Helm; returns its output, which depends on nothing but the arguments and the chart.

    Args:
        major: Which Helm, 3 or 4.
        values: YAML for its standard input.

    Raises:
        RenderError: it failed.
    """
    command = [str(tool(f"helm-{major}")), *args]
    result = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RenderError(result.stderr)
    return result.stdout


def render_text(
    *files: Path,
    values: Mapping[str, Any] | None = None,
    apis: Sequence[str] = (),
    kubernetes: str = KUBERNETES,
    major: int = 4,
    chart: Path = CHART,
) -> str:
    """The manifests for values from files and then from `values`, in a cluster with these APIs.

    Raises:
        RenderError: Helm refused them.
    """
    flags = [f"--values={file}" for file in files]
    flags += [f"--api-versions={api}" for api in apis]
    # JSON, which is YAML: PyYAML writes the text 1e3 as Helm reads a number.
    text = None if values is None else json.dumps(dict(values), ensure_ascii=False)
    flags += [] if text is None else ["--values=-"]
    return helm(
        "template", "rel", str(chart), "-n", "ns", f"--kube-version={kubernetes}", *flags, major=major, values=text
    )


def render(*files: Path, **options: Any) -> list[Tree]:
    """The objects of `render_text`."""
    return parse(render_text(*files, **options))


def parse(manifests: str) -> list[Tree]:
    """The objects of manifests."""
    return [each for each in yaml.load_all(manifests, Loader=yaml.CSafeLoader) if each]


@cache
def rendered_examples() -> Mapping[str, list[Tree]]:
    """Each example's objects, with LeaderWorkerSets and without; not to be changed."""
    objects = {f"{path.stem} StatefulSet": render(path) for path in EXAMPLES}
    return objects | {f"{path.stem} LeaderWorkerSet": render(path, apis=[LEADER_WORKER_SETS]) for path in EXAMPLES}


def find(objects: Sequence[Tree], kind: str, name: str = "") -> list[Tree]:
    """The objects of a kind whose names end with `name`."""
    return [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]


def pod_templates(objects: Sequence[Tree]) -> Iterator[tuple[str, Tree]]:
    """Every pod or pod template, with `KIND/NAME` of the object that has it."""
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        match each["kind"]:
            case "Pod":
                yield name, each
            case "Deployment" | "StatefulSet" | "Job":
                yield name, each["spec"]["template"]
            case "LeaderWorkerSet":
                yield name, each["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def containers(pod: Tree) -> list[Tree]:
    """All containers of a pod's spec, those that run first included."""
    return [*pod.get("initContainers", []), *pod["containers"]]
