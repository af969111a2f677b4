"""The tables of services/METRICS.md, generated from what the services serve: `make metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from lockstep.internal.v1 import exchange_pb2
from services.cli.processes.service_command import ServiceCommand
from services.cli.ranks import RanksCollector
from services.scheduler.cell.engine import Engine
from services.scheduler.core.policy import CacheSettings, SchedulerPolicy
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.metrics import make_registry as make_scheduler_registry
from services.scheduler.server.idle_check import IdleCheck
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.metrics import make_registry as make_tokenizer_registry
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.text.encoder import Encoder
from services.worker.layout import RankLayout
from services.worker.metrics import WorkerCollector
from services.worker.runner.cache_room import CacheRoom
from services.worker.runner.step_totals import StepTotals
from shared.process.metrics import make_process_registry
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.system.processes import ROOT
from tests.support.tables.generated_tables import replace_tables
from tests.support.tokenizer.chat_templates import local_template

if TYPE_CHECKING:
    from services.worker.runner.model_runner import ModelRunner
    from shared.network.tls import Certificates
    from shared.tenants.client_keys import ClientKeys

METRICS_FILE = ROOT / "services" / "METRICS.md"
BEGIN = "<!-- Made by `make metrics`: change services/*/metrics.py instead. -->\n"
END = "<!-- The end of what `make metrics` makes. -->\n"

# What a collector reads of a certificate.
_CERTIFICATES = cast("Certificates", SimpleNamespace(num_failed_reads=0, expires_at=datetime.now(UTC)))
# What a collector reads of clients' keys.
_CLIENT_KEYS = cast("ClientKeys", SimpleNamespace(num_keys=0, is_stale=False))

_UNITS = ("seconds", "bytes", "tokens")


def main() -> None:
    """Bring services/METRICS.md up to date."""
    tables = asyncio.run(render_tables())
    METRICS_FILE.write_text(with_tables(METRICS_FILE.read_text(encoding="utf-8"), tables), encoding="utf-8")


def with_tables(document: str, tables: str) -> str:
    """The document's text with its tables replaced.

    Raises:
        ValueError: the text does not have the two marks, once each and in order.
    """
    return replace_tables(document, BEGIN, END, tables)


async def render_tables() -> str:
    """One table for each service."""
    return "".join(_table(title, metrics) for title, metrics in (await collect_metrics()).items())


async def collect_metrics() -> dict[str, list[Metric]]:
    """What each service exports. Needs a running event loop, as the services' objects do."""
    registries = {
        "Tokenizer": await _tokenizer(),
        "Scheduler": _scheduler(),
        "Worker, each rank": _worker(),
        "`lockstep ranks`": _launcher(),
    }
    return {title: list(registry.collect()) for title, registry in registries.items()}


async def _tokenizer() -> CollectorRegistry:
    async def ignore() -> None:
        """Nothing follows the link."""

    client = SchedulerClient(("unix:none",), "", CellRequests(0.0), ignore, silence_s=1.0)
    # A cell, because without one its load has no samples, and so no labels.
    stream = client.open()
    stream.note_cell_info(exchange_pb2.CellInfo())
    stream.note_heartbeat(exchange_pb2.SchedulerHeartbeat(holds_workers=True))
    await client.on_heard(stream)
    prompts = PromptEncoder(Encoder(tiny_tokenizer()), local_template("", {}))
    return make_tokenizer_registry(client, RequestTotals(), prompts, _CERTIFICATES, _CLIENT_KEYS)


def _scheduler() -> CollectorRegistry:
    engine = Engine(SchedulerPolicy(), CacheSettings())
    idle_check = IdleCheck(engine, asyncio.get_running_loop())
    return make_scheduler_registry(engine, idle_check, _CERTIFICATES, LastSeen(0.0), _CLIENT_KEYS)


def _worker() -> CollectorRegistry:
    collector = WorkerCollector()
    # What it reads of a rank on a GPU, since a rank itself needs torch.
    runner = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        device_memory=lambda: SimpleNamespace(allocated_bytes=0, reserved_bytes=0),
        kv_cache_bytes=0,
        layout=RankLayout(),
        ops_backend="triton",
        progress=0,
        room=CacheRoom(1, 1, 1),
        state_bytes_per_slot=1,
        step_totals=StepTotals(),
    )
    collector.runner = cast("ModelRunner", runner)
    return make_process_registry(collector, _CERTIFICATES)


def _launcher() -> CollectorRegistry:
    rank = ServiceCommand("worker", (), "unix:none", "ranks", "0.0")
    return make_process_registry(RanksCollector([rank], {rank.name: 0}), _CERTIFICATES)


def _table(title: str, metrics: Iterable[Metric]) -> str:
    own = [metric for metric in metrics if metric.name.startswith("lockstep_")]
    rows = "".join(_row(metric) for metric in own)
    return f"**{title}**\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}\n"


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
    unit = next((unit for unit in _UNITS if metric.name.endswith(unit)), "ratio" if name.endswith("perc") else "")
    return f"| `{name}` | {metric.type} | {unit} | {_code(labels)} | {metric.documentation} |\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()
