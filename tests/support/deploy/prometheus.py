"""A real Prometheus that scrapes rendered pods as their PodMonitor says, with the rules of the PrometheusRule.

Time is shortened: each `for` is divided by `FASTER`, and targets are scraped and rules evaluated every `INTERVAL`.
Expressions, and the ranges in them, are as rendered.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy.chart import Tree, find
from tests.support.deploy.rendered_pods import NAMESPACE, Pod
from tests.support.system.ports import free_port
from tests.support.system.processes import python_command

FASTER = 30
INTERVAL = "1s"
_UNITS = {"s": 1, "m": 60, "h": 3600}


class QueryError(Exception):
    """Prometheus refused a query; the text is its own."""


@dataclass(frozen=True)
class Prometheus:
    """The API of a server."""

    address: str

    async def is_ready(self) -> bool:
        """Whether it serves."""
        try:
            await asyncio.to_thread(self._get, "/-/ready", {})
        except (OSError, QueryError):
            return False
        return True

    async def query(self, expression: str) -> list[Tree]:
        """The samples that an expression has now.

        Raises:
            QueryError: it is refused.
        """
        answer = await self._ask("query", query=expression)
        samples: list[Tree] = answer["result"]
        return samples

    async def rules(self) -> list[Tree]:
        """All rules, with what their last evaluation said."""
        return [rule for group in (await self._ask("rules"))["groups"] for rule in group["rules"]]

    async def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = (await self._ask("alerts"))["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    async def _ask(self, name: str, **query: str) -> Any:
        body = await asyncio.to_thread(self._get, f"/api/v1/{name}", query)
        return json.loads(body)["data"]

    def _get(self, path: str, query: Mapping[str, str]) -> bytes:
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            raise QueryError(error.read().decode()) from error
        return body


@contextmanager
def run_prometheus(folder: Path, objects: Sequence[Tree], pods: Sequence[Pod]) -> Iterator[Prometheus]:
    """Start it without waiting; the test is skipped where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: `apt-get install prometheus`")
    folder.mkdir()
    (folder / "rules.json").write_text(json.dumps({"groups": rule_groups(objects)}))
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [str(folder / "rules.json")],
        "scrape_configs": scrape_configs(objects, pods),
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={folder}/prometheus.json", f"--storage.tsdb.path={folder}/data"]
    command = python_command("-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", program, *flags)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
    try:
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait()


def rule_groups(objects: Sequence[Tree]) -> list[Tree]:
    """The rendered groups, faster."""
    [rendered] = find(objects, "PrometheusRule")
    return [
        {**group, "rules": [{**rule, **_faster(rule)} for rule in group["rules"]]}
        for group in rendered["spec"]["groups"]
    ]


def _faster(rule: Tree) -> Tree:
    if "for" not in rule:
        return {}
    number, unit = re.fullmatch(r"(\d+)([smh])", rule["for"]).groups()  # type: ignore[union-attr]
    return {"for": f"{int(number) * _UNITS[unit] * 1000 // FASTER}ms"}


def scrape_configs(objects: Sequence[Tree], pods: Sequence[Pod]) -> list[Tree]:
    """What the operator makes of the PodMonitors: a job for each endpoint, with the pods that have its port."""
    configs = []
    for monitor in find(objects, "PodMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        chosen = [pod for pod in pods if selector.items() <= pod.labels.items()]
        for number, each in enumerate(monitor["spec"]["podMetricsEndpoints"]):
            configs.append(
                {
                    "job_name": f"podMonitor/{NAMESPACE}/{monitor['metadata']['name']}/{number}",
                    "metrics_path": each["path"],
                    "relabel_configs": [_relabeling(one) for one in each["relabelings"]],
                    "static_configs": [_target(pod, each["port"]) for pod in chosen if pod.has_port(each["port"])],
                }
            )
    return configs


def _relabeling(rendered: Tree) -> Tree:
    """In the words of Prometheus, which has snake case."""
    return {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name): value for name, value in rendered.items()}


def _target(pod: Pod, port: str) -> Tree:
    """A pod's port, with the labels of its discovery, and those that the operator always adds."""
    found = {
        f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": pod.labels[name] for name in pod.labels
    }
    added = {"namespace": NAMESPACE, "pod": pod.name, "endpoint": port}
    return {"targets": [f"{pod.address}:{pod.port(port)}"], "labels": {**found, **added}}
