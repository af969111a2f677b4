"""Rules and dashboards use what the services export, and the other way round."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from services.tokenizer.answer.request_totals import RequestTotals
from tests.deploy.test_alerts import FILES, RULES, promtool
from tests.support.deploy.chart import CHART, find, render
from tests.support.tables.metrics_table import collect_metrics

DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
# What Prometheus knows of a target by itself.
OF_PROMETHEUS = {"up", "scrape_duration_seconds", "ALERTS"}
TARGET_LABELS = {"namespace", "cell", "role", "pod", "instance"}
_METRIC = re.compile(r"\b(?:lockstep|process)_\w+|\bup\b|\bscrape_\w+")
_SELECTOR = re.compile(r"\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """A dashboard's panels."""
    return list(json.loads(dashboard.read_text(encoding="utf-8"))["panels"])


def dashboard_queries(dashboard: Path) -> list[str]:
    """The queries of a dashboard's panels, with its variables as Grafana fills them in."""
    targets = [target for panel in panels(dashboard) for target in panel.get("targets", [])]
    return [target["expr"].replace("$__rate_interval", "5m").replace("$", "") for target in targets]


def rules() -> list[dict[str, Any]]:
    """All rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def autoscaler_queries() -> list[str]:
    """Queries of the example with an autoscaler."""
    [scaled] = find(render(CHART / "examples" / "keda.yaml"), "ScaledObject")
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def all_queries() -> list[str]:
    """Queries of rules, dashboards and the autoscaler."""
    of_dashboards = [query for path in DASHBOARDS for query in dashboard_queries(path)]
    return [rule["expr"] for rule in rules()] + of_dashboards + autoscaler_queries()


async def exported() -> dict[str, Metric]:
    """Every metric that a service exports, by the names of its samples."""
    metrics = [metric for each in (await collect_metrics()).values() for metric in each]
    return {sample: metric for metric in metrics for sample in sample_names(metric)}


def sample_names(metric: Metric) -> list[str]:
    """The names that a query may use; a histogram may have no sample yet."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
    return [metric.name + suffix for suffix in suffixes]


async def test_every_metric_in_rules_and_dashboards_is_exported() -> None:
    names = {name for query in all_queries() for name in _METRIC.findall(query)}
    assert names - OF_PROMETHEUS - set(await exported()) == set()
    recorded = {name for query in all_queries() for name in re.findall(r"lockstep:[\w:]+", query)}
    assert recorded == {rule["record"] for rule in rules() if "record" in rule}


async def test_every_metric_of_ours_is_in_a_dashboard() -> None:
    shown = {name for path in DASHBOARDS for query in dashboard_queries(path) for name in _METRIC.findall(query)}
    # The recorded ratio of both is shown.
    shown |= {"lockstep_prefix_cache_hits_total", "lockstep_prefix_cache_queries_total"}
    ours = {metric.name: metric for metric in (await exported()).values() if metric.name.startswith("lockstep_")}
    assert [name for name, metric in ours.items() if not shown.intersection(sample_names(metric))] == []


async def test_every_label_and_its_values_are_exported() -> None:
    families = (await exported()).values()
    labels = {label for metric in families for sample in metric.samples for label in sample.labels}
    matchers = [each for query in all_queries() for part in _SELECTOR.findall(query) for each in _MATCHER.findall(part)]
    groupings = [part for query in all_queries() for part in _GROUPING.findall(query)]
    used = {name for name, _ in matchers} | {name.strip() for part in groupings for name in part.split(",") if name}
    assert used - labels - TARGET_LABELS == set()
    reasons = {value for name, values in matchers if name == "reason" for value in values.split("|")}
    assert reasons - set(RequestTotals().num_by_failure) == set()


async def test_every_objective_is_the_bound_of_a_bucket() -> None:
    metrics = await exported()
    bounds = re.findall(r'(lockstep_\w+_bucket)\{le="([\d.]+)"\}', RULES.read_text(encoding="utf-8"))
    assert len(bounds) == 4
    for name, bound in bounds:
        assert bound in {sample.labels.get("le") for sample in metrics[name].samples}, name


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboards_panels_lie_side_by_side_and_have_numbers_of_their_own(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert dashboard["uid"] == path.stem
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "namespace", "cell"]
    numbers = [panel["id"] for panel in panels(path)]
    assert len(numbers) == len(set(numbers))
    cells: set[tuple[int, int]] = set()
    for panel in panels(path):
        place = panel["gridPos"]
        rows, columns = range(place["y"], place["y"] + place["h"]), range(place["x"], place["x"] + place["w"])
        own = {(row, column) for row in rows for column in columns}
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_prometheus_parses_every_query_of_the_dashboards(tmp_path: Path) -> None:
    queries = [query for path in DASHBOARDS for query in dashboard_queries(path)]
    records = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "queries", "rules": records}]}))
    result = promtool("check", "rules", str(tmp_path / "rules.json"))
    assert result.returncode == 0, result.stdout + result.stderr
