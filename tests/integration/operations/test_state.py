"""The state of a running cell as seen by users and programs: `lockstep top` and the metrics page."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.v1 import scheduler_pb2
from services.cli.clients.running_cells import RunningCell, publish_cell
from services.cli.clients.top import render
from tests.support.cells.cell import popen_lockstep
from tests.support.cells.narrow_cell import NarrowCell
from tests.support.clients.client import connect, token_request
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service

PROMPT = list(range(1, 40))


async def serve_some(cell: NarrowCell) -> scheduler_pb2.GetStateResponse:
    """Serve a prompt twice, the second time from the prefix cache; returns the state afterwards."""
    async with connect(cell.cell) as client:
        for _ in range(2):
            await client.generate(token_request(PROMPT, max_tokens=4))
        return await client.wait_until_idle()


def scrape(cell: NarrowCell) -> dict[str, float]:
    """The samples of the scheduler's metrics, by name with the label's value appended."""
    with urllib.request.urlopen(f"http://{cell.scheduler_metrics}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def run_top(*args: str, temp_dir: str | None = None) -> subprocess.CompletedProcess[str]:
    with popen_lockstep("top", *args, temp_dir=temp_dir) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def read_until(fd: int, pattern: str) -> str:
    seen = ""
    while not re.search(pattern, seen, re.DOTALL):
        seen += os.read(fd, 4096).decode()
    return seen


async def test_the_launcher_says_where_the_scheduler_is(narrow_cell: NarrowCell) -> None:
    assert narrow_cell.cell.ready_line.endswith(f"scheduler on {narrow_cell.scheduler_address}\n")


async def test_one_snapshot_says_what_the_state_says(narrow_cell: NarrowCell) -> None:
    state = await serve_some(narrow_cell)
    result = run_top("--once", f"--target={narrow_cell.cell.cell_address}")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == render(narrow_cell.cell.cell_address, state)
    assert state.num_prefix_hit_tokens > 0
    assert state.num_completion_tokens > 0


async def test_the_cell_that_runs_here_is_found_without_a_target(narrow_cell: NarrowCell) -> None:
    state = await serve_some(narrow_cell)
    result = run_top("--once", temp_dir=narrow_cell.cell.temp_dir)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == render(narrow_cell.cell.cell_address, state, model=narrow_cell.cell.ready_line.split()[2])


async def test_a_scrape_says_what_the_state_says(narrow_cell: NarrowCell) -> None:
    state = await serve_some(narrow_cell)
    scraped = scrape(narrow_cell)
    assert scraped["lockstep_worker_attached 0"] == 1
    assert scraped["lockstep_steps_total prefill 0"] == state.num_prefill_steps > 0
    assert scraped["lockstep_steps_total decode 0"] == state.num_decode_steps > 0
    assert scraped["lockstep_requests_finished_total"] == state.num_finished > 0
    assert scraped["lockstep_prefix_cache_hits_total"] == state.num_prefix_hit_tokens > 0
    assert scraped["lockstep_kv_cache_blocks 0 cached"] == state.num_cached_blocks > 0
    assert scraped["lockstep_kv_cache_blocks 0 blank"] == state.num_free_blocks - state.num_cached_blocks
    assert scraped["process_resident_memory_bytes"] > 0


async def test_an_idle_cell_checks_its_integrity(narrow_cell: NarrowCell) -> None:
    await serve_some(narrow_cell)
    num_checks_before = scrape(narrow_cell)["lockstep_integrity_checks_total"]
    while (scraped := scrape(narrow_cell))["lockstep_integrity_checks_total"] == num_checks_before:
        assert scraped["lockstep_num_requests_running"] == 0
    assert scraped["lockstep_integrity_failures_total"] == 0


def test_in_a_terminal_each_snapshot_stands_over_the_last_one_until_ctrl_c(narrow_cell: NarrowCell) -> None:
    person, program = pty.openpty()
    command = ("top", f"--target={narrow_cell.cell.cell_address}", "--interval=0.1")
    with popen_lockstep(*command, stdin=program, stdout=program, stderr=program) as process:
        seen = read_until(person, r"\x1b\[H.*ready.*\x1b\[H.*last 0\.\d s.*\x1b\[H")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    os.close(person)
    os.close(program)
    assert "Traceback" not in seen


def test_in_a_pipe_snapshots_come_one_below_the_other_until_the_reader_ends(narrow_cell: NarrowCell) -> None:
    with popen_lockstep("top", f"--target={narrow_cell.cell.cell_address}", "--interval=0.1") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = read_until(process.stdout.fileno(), r"(scheduler .*){3}")
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == ""
    assert "\x1b" not in seen


def test_top_outlives_the_scheduler() -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as directory:
        address = f"unix:{directory}/cell.sock"
        flags = (f"--listen=unix:{directory}/s.sock", f"--cell-listen={address}", f"--workers=unix:{directory}/w.sock")
        with ExitStack() as stack:
            scheduler = stack.enter_context(start_service("scheduler", *flags))
            while run_top("--once", f"--target={address}").returncode:
                assert scheduler.poll() is None
            top = stack.enter_context(popen_lockstep("top", f"--target={address}", "--interval=0.1"))
            stack.callback(top.kill)
            assert top.stdout is not None
            read_until(top.stdout.fileno(), "no worker is attached")
            scheduler.kill()
            scheduler.wait()
            seen = read_until(
                top.stdout.fileno(), r"has not answered for \d+ s; trying again\n.*requests waiting .*\n\n"
            )
            assert "before that:\n" in seen
            stack.enter_context(start_service("scheduler", *flags))
            read_until(top.stdout.fileno(), "no worker is attached")
            top.send_signal(signal.SIGINT)
            _, stderr = top.communicate()
    assert (top.returncode, stderr) == (130, "")


def test_a_scheduler_that_is_not_there_is_told() -> None:
    result = run_top("--once", f"--target=127.0.0.1:{free_port()}")
    assert result.returncode == 1
    assert result.stderr.startswith("error: UNAVAILABLE: ")


@pytest.mark.parametrize("command", [["top", "--once"], ["generate", "Hello"], ["chat"]])
def test_a_cell_that_is_found_but_does_not_answer_is_named(command: list[str], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    directory = tmp_path / "lockstep-starting"
    directory.mkdir(mode=0o700)
    with (
        publish_cell(directory, RunningCell("mine", address, address)),
        popen_lockstep(*command, temp_dir=str(tmp_path), stdin=subprocess.PIPE) as process,
    ):
        stdout, stderr = process.communicate("Hello\n")
    assert (process.returncode, stdout.strip()) == (1, "")
    assert stderr == f"error: the cell of mine does not answer at {address}: it may still be starting\n"


def test_a_door_that_is_not_the_schedulers_for_the_cell_is_told(narrow_cell: NarrowCell) -> None:
    address_to_name = {
        narrow_cell.cell.address: "the tokenizer's address",
        narrow_cell.scheduler_address: "the scheduler's address for clients",
    }
    for address, name in address_to_name.items():
        result = run_top("--once", f"--target={address}")
        assert result.returncode == 1
        assert result.stderr.startswith(f"error: {address} is {name}: `lockstep top` asks ")
