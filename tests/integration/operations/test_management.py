"""Every process of a cell answers probes and serves metrics, in each phase of its life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.cli.processes.service_command import ROLES
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import connect, text_request
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service
from tests.support.system.scraping import get, probes, scrape, values, wait_for_probes

READY = {"livez": "200 ok", "startupz": "200 ok", "readyz": "200 ok"}
_POLL_S = 0.02


@dataclass(frozen=True)
class Watched:
    """A cell, and the management port of each of its processes by name."""

    cell: Cell
    addresses: dict[str, str]


@pytest.fixture(scope="module")
def watched(tiny_model: Path) -> Iterator[Watched]:
    """A cell of one group of two ranks."""
    flags = [f"--{role}.manage-listen=127.0.0.1:0" for role in ROLES]
    with start_cell(tiny_model, "--tp=2", *flags) as cell:
        ports = re.findall(r"(?m)^(\w[\w. ]*?) +\| .*serving metrics and probes .*'127.0.0.1', (\d+)", cell.log())
        yield Watched(cell, {name: f"127.0.0.1:{port}" for name, port in ports})


def stop(process: psutil.Process) -> None:
    """Stop a process as a debugger does; returns when it is stopped."""
    process.send_signal(signal.SIGSTOP)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(_POLL_S)


async def test_all_processes_of_a_serving_cell_are_ready(watched: Watched) -> None:
    answers = {name: await probes(address) for name, address in watched.addresses.items()}
    assert answers == dict.fromkeys(["tokenizer", "scheduler", "worker 0.0", "worker 0.1"], READY)


async def test_every_process_is_scraped_and_counts_what_it_did(watched: Watched) -> None:
    async with connect(watched.cell) as client:
        await client.generate(text_request("The fox", max_tokens=5))
        await client.wait_until_idle()
    pages = {name: values(await scrape(address)) for name, address in watched.addresses.items()}
    assert pages["tokenizer"]["lockstep_request_success_total max_tokens"] >= 1
    assert pages["tokenizer"]["lockstep_request_queue_time_seconds_count"] >= 1
    assert pages["tokenizer"]["lockstep_generation_tokens_total"] >= 5
    assert pages["scheduler"]["lockstep_num_requests_running"] == 0
    for rank in ("0", "1"):
        page = pages[f"worker 0.{rank}"]
        assert any(name.startswith("lockstep_worker_info") and name.endswith(f"cpu 0 {rank}") for name in page)
        assert page["lockstep_step_tokens_total decode"] == pages["worker 0.0"]["lockstep_step_tokens_total decode"]
        assert page["lockstep_step_device_time_seconds_count decode"] >= 4


async def test_a_head_has_the_headers_of_a_get(watched: Watched) -> None:
    for address in watched.addresses.values():
        assert (await get(address, "/readyz", method="HEAD")).headers == (await get(address, "/readyz")).headers
        page = await get(address, "/metrics", method="HEAD")
        assert (page.status, page.body) == (200, "")
        assert int(page.headers["Content-Length"]) > 1000


@pytest.mark.parametrize("name", ["tokenizer", "scheduler", "worker 0.1"])
async def test_a_stopped_event_loop_is_not_live(watched: Watched, name: str) -> None:
    process = watched.cell.find_processes()[name]
    try:
        stop(process)
        asked = asyncio.create_task(get(watched.addresses[name], "/livez"))
        # What is to be shown is that nothing comes: as long as others take many times over.
        await asyncio.wait([asked], timeout=0.3)
        assert not asked.done()
    finally:
        process.send_signal(signal.SIGCONT)
    assert (await asked).status == 200


async def test_a_rank_whose_domain_has_not_met_lives_but_has_not_started(tiny_model: Path, tmp_path: Path) -> None:
    manage = f"unix:{tmp_path}/manage"
    domain = ["--tp-size=2"]
    flags = [f"--model-dir={tiny_model}", f"--listen=unix:{tmp_path}/worker", f"--manage-listen={manage}", *domain]
    with start_service("worker", *flags):
        loading = "503 the weights are loading"
        await wait_for_probes(manage, {"livez": "200 ok", "startupz": loading, "readyz": loading})
        assert values(await scrape(manage)) == {}


async def test_without_partners_a_scheduler_is_ready_and_a_tokenizer_is_not(tiny_model: Path, tmp_path: Path) -> None:
    links = [f"--listen=unix:{tmp_path}/scheduler", f"--cell-listen=unix:{tmp_path}/cell"]
    scheduler = [*links, f"--workers=unix:{tmp_path}/none", f"--manage-listen=unix:{tmp_path}/s"]
    tokenizer = [
        f"--model-dir={tiny_model}",
        f"--listen=unix:{tmp_path}/tokenizer",
        f"--scheduler=unix:{tmp_path}/cell",
    ]
    with (
        start_service("scheduler", *scheduler),
        start_service("tokenizer", *tokenizer, f"--manage-listen=unix:{tmp_path}/t"),
    ):
        await wait_for_probes(f"unix:{tmp_path}/s", READY)
        unlinked = {
            "livez": "200 ok",
            "startupz": "200 ok",
            "readyz": "503 not linked to a scheduler that holds workers",
        }
        await wait_for_probes(f"unix:{tmp_path}/t", unlinked)


def tool(name: str) -> str:
    """A program of Debian's package `prometheus`; its test is skipped where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: `apt-get install prometheus`")
    return path


@pytest.mark.slow
def test_promtool_finds_nothing_wrong_with_any_page(watched: Watched) -> None:
    promtool = tool("promtool")
    for name, address in watched.addresses.items():
        page = asyncio.run(get(address, "/metrics")).body
        result = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (name, result.returncode, result.stdout + result.stderr) == (name, 0, "")


@contextlib.contextmanager
def running_prometheus(targets: Sequence[str], directory: Path) -> Iterator[str]:
    """A Prometheus that scrapes `targets` every second; its URL."""
    config = {"scrape_configs": [{"job_name": "cell", "static_configs": [{"targets": list(targets)}]}]}
    (directory / "prometheus.yml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, **config}))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    command = [tool("prometheus"), *flags, f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://{address}/api/v1"
        finally:
            process.terminate()


def ask(url: str) -> Any:
    """Ask Prometheus until it answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(url) as response:
            return json.load(response)["data"]
        assert time.monotonic() < deadline
        time.sleep(_POLL_S)


@pytest.mark.slow
def test_a_real_prometheus_scrapes_every_process(watched: Watched, tmp_path: Path) -> None:
    with running_prometheus(list(watched.addresses.values()), tmp_path) as url:
        targets = ask(f"{url}/targets")["activeTargets"]
        while "unknown" in [target["health"] for target in targets] or not targets:
            targets = ask(f"{url}/targets")["activeTargets"]
        assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * 4
        for metric, num_series in (
            ("lockstep_num_requests_running", 1),
            ("lockstep_kv_cache_usage_perc", 1),
            ("lockstep_worker_info", 2),
            ("lockstep_time_to_first_token_seconds_count", 1),
            ("histogram_quantile(0.9,lockstep_step_device_time_seconds_bucket{kind='decode'})", 2),
        ):
            assert len(ask(f"{url}/query?{urllib.parse.urlencode({'query': metric})}")["result"]) == num_series, metric
