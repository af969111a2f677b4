"""Every process of a cell answers probes and serves metrics, in each phase of its life."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.cell import Cell, start_cell
from tests.support.client import connect, text_request
from tests.support.ports import free_port
from tests.support.processes import start_service
from tests.support.scraping import get, probes, scrape, values

READY = {"livez": "200 ok", "startupz": "200 ok", "readyz": "200 ok"}
_POLL_S = 0.02


@dataclass(frozen=True)
class Watched:
    """A cell, and the management port of each of its processes by name."""

    cell: Cell
    addresses: dict[str, str]


@pytest.fixture(scope="module")
def watched(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A cell of one group of two ranks."""
    directory = tmp_path_factory.mktemp("manage")
    addresses = {"tokenizer": f"127.0.0.1:{free_port()}", "scheduler": f"127.0.0.1:{free_port()}"}
    flags = [f"--{role}.manage-listen={address}" for role, address in addresses.items()]
    addresses |= {f"worker {rank}": f"unix:{directory}/worker.{rank}" for rank in ("0.0", "0.1")}
    with start_cell(tiny_model, "--tp=2", f"--worker.manage-listen=unix:{directory}/worker", *flags) as cell:
        yield Watched(cell, addresses)


async def until_answered(address: str) -> dict[str, str]:
    """The probes' answers, once the process listens."""
    while True:
        try:
            return await probes(address)
        except OSError:
            await asyncio.sleep(_POLL_S)


async def test_all_processes_of_a_serving_cell_are_ready(watched: Watched) -> None:
    assert {name: await probes(address) for name, address in watched.addresses.items()} == dict.fromkeys(
        watched.addresses, READY
    )


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
    watched.cell.send_signal(name, signal.SIGSTOP)
    try:
        process = watched.cell.find_processes()[name]
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(_POLL_S)
        asked = asyncio.create_task(get(watched.addresses[name], "/livez"))
        # What is to be shown is that nothing comes: as long as others take many times over.
        await asyncio.wait([asked], timeout=0.3)
        assert not asked.done()
    finally:
        watched.cell.send_signal(name, signal.SIGCONT)
    assert (await asked).status == 200


async def test_a_rank_whose_domain_has_not_met_lives_but_has_not_started(tiny_model: Path, tmp_path: Path) -> None:
    manage = f"unix:{tmp_path}/manage"
    domain = ["--tp-size=2", "--domain-start-id=x", f"--rendezvous=127.0.0.1:{free_port()}"]
    flags = [f"--model-dir={tiny_model}", f"--listen=unix:{tmp_path}/worker", f"--manage-listen={manage}", *domain]
    with start_service("worker", *flags):
        answers = await until_answered(manage)
        assert answers["livez"] == "200 ok"
        assert answers["startupz"] == answers["readyz"] == "503 the weights are loading"
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
        while await until_answered(f"unix:{tmp_path}/s") != READY:
            await asyncio.sleep(_POLL_S)
        unlinked = {"livez": "200 ok", "startupz": "200 ok", "readyz": "503 not linked to a scheduler"}
        while await until_answered(f"unix:{tmp_path}/t") != unlinked:
            await asyncio.sleep(_POLL_S)


def tool(name: str) -> str:
    """A program of Debian's package `prometheus`; its test is skipped where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: `apt-get install prometheus`")
    return path


@pytest.mark.slow
async def test_promtool_finds_nothing_wrong_with_any_page(watched: Watched) -> None:
    promtool = tool("promtool")
    for name, address in watched.addresses.items():
        page = (await get(address, "/metrics")).body
        result = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (name, result.returncode, result.stdout + result.stderr) == (name, 0, "")
