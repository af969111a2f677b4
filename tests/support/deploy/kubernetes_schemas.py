"""Checks of objects against the Kubernetes API's published schemas, of the package kubernetes-validate, strict.

Custom resources have schemas of their own in tests/support/crds: excerpts of the published definitions, with what the
chart uses, written down by hand. Nothing else is allowed in them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.support.deploy.chart import Tree
from tests.support.system.package_tools import tool
from tests.support.system.processes import ROOT

CRDS = ROOT / "tests" / "support" / "deploy" / "crds"
_DEFINITIONS = "_definitions.json"
_URI = "https://kubernetes.io/api/_definitions.json"


def find_errors(objects: list[Tree], minor: int) -> list[str]:
    """What is wrong with objects in Kubernetes 1.`minor`: a line each, which names the object and the field."""
    return [
        f"{each['kind']}/{each['metadata']['name']}: {error.json_path}: {error.message}"
        for each in [*objects, *_pod_templates(objects)]
        for error in _validator(each["kind"], each["apiVersion"], minor).iter_errors(each)
    ]


def _pod_templates(objects: list[Tree]) -> list[Tree]:
    """The pods of custom resources, as objects that Kubernetes itself knows."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": each["metadata"]["name"]},
            "template": each["spec"]["leaderWorkerTemplate"]["workerTemplate"],
        }
        for each in objects
        if each["kind"] == "LeaderWorkerSet"
    ]


@cache
def _validator(kind: str, api_version: str, minor: int) -> Draft202012Validator:
    """Raises:
    AssertionError: this release of Kubernetes has no such kind.
    """
    custom = CRDS / f"{kind.lower()}.json"
    if custom.exists():
        schema = _read(custom)
        assert schema["properties"]["apiVersion"]["const"] == api_version
        return Draft202012Validator(schema)
    group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    path = tool("kubernetes-schemas") / f"1.{minor}" / f"{name}.json"
    assert path.exists(), f"Kubernetes 1.{minor} has no {kind} of {api_version}"
    return Draft202012Validator(_read(path), registry=_registry(minor))


@cache
def _registry(minor: int) -> Registry[Any]:
    definitions = _read(tool("kubernetes-schemas") / f"1.{minor}" / _DEFINITIONS)
    resource = Resource.from_contents(definitions, default_specification=DRAFT202012)
    registry: Registry[Any] = Registry().with_resource(_URI, resource).crawl()
    return registry


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
