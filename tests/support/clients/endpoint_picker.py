"""How the endpoint picker of an InferencePool reads the metrics of a pool's member.

Written after llm-d-router, `pkg/epp/framework/plugins/datalayer/extractor/metrics/extractor.go`, which is stricter in
nothing: it takes any sample of a metric and also counters. Without LoRA adapters an engine has no metric of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.system.processes import ROOT
from tests.support.system.scraping import get

_FILES = ROOT / "deploy" / "helm" / "lockstep" / "files"
CONFIGS = {"grpc": _FILES / "endpoint-picker.yaml", "http": _FILES / "endpoint-picker-http.yaml"}
"""The picker's configuration for a pool of each protocol."""


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """What the picker knows of a member after a scrape."""

    num_queued: int
    num_running: int
    kv_usage: float
    block_size: int
    num_blocks: int


def read_config(protocol: str = "grpc") -> dict[str, Any]:
    """The parameters of each plugin in the picker's configuration for a pool of a protocol, by its type."""
    config = yaml.safe_load(CONFIGS[protocol].read_text(encoding="utf-8"))
    return {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}


def read_engine(protocol: str = "grpc") -> dict[str, str]:
    """What the configuration says of Lockstep's metrics."""
    [engine] = read_config(protocol)["core-metrics-extractor"]["engineConfigs"]
    return dict(engine)


async def scrape_member(address: str) -> MemberLoad:
    """Read a member's metrics at `HOST:PORT` as the configuration says.

    Raises:
        LookupError: a metric is missing. The picker then keeps the values that it has.
    """
    page = await get(address, "/metrics")
    assert page.status == 200
    families = {family.name: family for family in text_string_to_metric_families(page.body)}
    engine = read_engine()
    info = _only_sample(families, engine["cacheInfoSpec"])
    return MemberLoad(
        num_queued=int(_only_sample(families, engine["queuedRequestsSpec"]).value),
        num_running=int(_only_sample(families, engine["runningRequestsSpec"]).value),
        kv_usage=_only_sample(families, engine["kvUsageSpec"]).value,
        # The labels that the picker expects if its configuration names none.
        block_size=int(info.labels["block_size"]),
        num_blocks=int(info.labels["num_gpu_blocks"]),
    )


def _only_sample(families: Mapping[str, Metric], name: str) -> Sample:
    family = families[name]
    assert family.type == "gauge", "the protocol demands a gauge"
    if not family.samples:
        raise LookupError(f"{name} has no sample")
    [sample] = family.samples
    return sample
