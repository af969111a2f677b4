"""`lockstep serve` as a user or a script sees it: start, stop and error messages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.health import Health, wait_until_serving
from shared.network.rpc import make_channel, make_server, reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell, popen_lockstep, run_serve, start_cell
from tests.support.clients.client import text_request
from tests.support.system.patience import PATIENCE_S
from tests.support.system.pipes import full_pipe
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service

ROLES = ("worker", "scheduler", "tokenizer")
IDLE_S = 10.0


def free_address() -> str:
    return f"--listen=127.0.0.1:{free_port()}"


def assert_nothing_is_left(cell: Cell, runtime_dir: Path) -> None:
    assert not [p for p in cell.role_to_process.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not runtime_dir.exists()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_tokenizer_then_scheduler_then_worker(tiny_model: Path, signal_number: signal.Signals) -> None:
    with start_cell(tiny_model) as cell:
        runtime_dir = cell.runtime_dir
        assert runtime_dir.stat().st_mode & 0o777 == 0o700

        assert cell.stop(signal_number) == 0

        stopped = re.findall(r"serve: stopped role=(\w+) pid=(\d+)", cell.log())
        order = ("tokenizer", "scheduler", "worker")
        assert stopped == [(role, str(cell.role_to_process[role].pid)) for role in order]
        assert_nothing_is_left(cell, runtime_dir)


def begin_answer(cell: Cell, stack: ExitStack, *, max_tokens: int) -> Iterator[tokenizer_pb2.GenerateResponse]:
    """Begin an answer of `max_tokens`, and read its first token."""
    stub = stack.enter_context(cell.stub())
    call = stub.Generate(text_request("Hello", max_tokens=max_tokens, ignore_eos=True))
    while not next(call).token_ids:
        pass
    answer: Iterator[tokenizer_pb2.GenerateResponse] = call
    return answer


def test_a_busy_cell_that_is_asked_to_stop_finishes_its_answers(tiny_model: Path) -> None:
    with start_cell(tiny_model) as cell, ExitStack() as stack:
        answer = begin_answer(cell, stack, max_tokens=200)
        cell.launcher.send_signal(signal.SIGTERM)
        *_, last = answer
        assert last.finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS
        assert cell.wait() == 0


def test_the_second_signal_stops_a_busy_cell_at_once(tiny_model: Path) -> None:
    with start_cell(tiny_model, "--drain-s=3600") as cell, ExitStack() as stack:
        answer = begin_answer(cell, stack, max_tokens=400)
        # The answer does not end by itself.
        cell.send_signal("worker", signal.SIGSTOP)
        cell.launcher.send_signal(signal.SIGINT)
        cell.wait_for_log("draining num_requests=1")
        cell.launcher.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as ended:
            list(answer)
        assert reason_of(status_from_rpc_error(ended.value)) == "DRAINING"
        cell.send_signal("worker", signal.SIGCONT)
        assert cell.wait() == 0


def test_ctrl_c_in_a_terminal_reaches_the_launcher_alone(tiny_model: Path) -> None:
    with start_cell(tiny_model) as cell:
        launcher_session = os.getsid(cell.launcher.pid)
        sessions = {os.getsid(process.pid) for process in cell.role_to_process.values()}
        assert launcher_session not in sessions
        assert len(sessions) == len(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_a_service_that_dies_before_the_cell_serves_is_named_and_ends_the_others(tiny_model: Path, role: str) -> None:
    with popen_lockstep("serve", str(tiny_model), free_address()) as launcher:
        assert launcher.stderr is not None
        while f"started role={role} pid=" not in (line := launcher.stderr.readline()):
            assert line, "the launcher ended before it had started the service"
        services = psutil.Process(launcher.pid).children()
        os.kill(int(line.rpartition("=")[2]), signal.SIGKILL)
        _, log = launcher.communicate()

    assert launcher.returncode == 1
    assert f"error: the {role} was killed by SIGKILL\n" in log
    assert not [service for service in services if service.is_running()]


async def test_what_answers_on_a_port_that_was_taken_meanwhile_is_not_taken_for_the_cell(tiny_model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    health = Health(())
    await health.set_serving(True)
    with popen_lockstep("serve", str(tiny_model), f"--listen={address}") as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        while "started role=tokenizer pid=" not in (line := launcher.stderr.readline()):
            assert line, "the launcher ended before it had started the tokenizer"
        tokenizer = psutil.Process(int(line.rpartition("=")[2]))
        tokenizer.suspend()
        stranger = make_server(address, [health])
        await stranger.start()
        # Now only the tokenizer itself is not ready.
        while "ready role=scheduler" not in (line := await asyncio.to_thread(launcher.stderr.readline)):
            assert line, "the launcher ended before the scheduler was ready"
        tokenizer.resume()
        ready_line = await asyncio.to_thread(launcher.stdout.readline)
        launcher.terminate()
        _, log = await asyncio.to_thread(launcher.communicate, None, PATIENCE_S)
        await stranger.stop(None)

    assert ready_line == ""
    assert launcher.returncode == 1
    assert log.splitlines()[-1].startswith("error: the tokenizer exited with code 1: cannot serve")


def test_a_cell_stops_cleanly_while_a_service_waits_for_its_next_start(tiny_model: Path) -> None:
    with start_cell(tiny_model) as cell:
        runtime_dir = cell.runtime_dir
        pid = cell.kill("scheduler")
        cell.wait_for_log(f"exited; restarting role=scheduler pid={pid}")

        assert cell.stop() == 0
        assert_nothing_is_left(cell, runtime_dir)


def refused(*args: str) -> str:
    """Run `lockstep serve` with arguments that it must refuse before starting anything; returns its last line."""
    result = run_serve(*args)
    assert result.returncode == 2
    assert "started" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--worker.no-such-flag=1", "the worker rejects its settings: unrecognized arguments: --no-such-flag=1"),
        ("--scheduler.max-num-seqs=many", "the scheduler rejects its settings: --max-num-seqs (or LOCKSTEP_SCHEDULER_"),
        ("--tokenizer.num-encode-threads=0", "the tokenizer rejects its settings: --num-encode-threads (or LOCKSTEP_"),
    ],
)
def test_a_bad_flag_of_a_service_is_refused_before_anything_starts(tiny_model: Path, flag: str, problem: str) -> None:
    assert refused(str(tiny_model), free_address(), flag).startswith(f"error: {problem}")


async def test_a_cell_whose_output_is_not_read_serves_and_stops(tiny_model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        full_pipe() as (reader, stderr),
        popen_lockstep("serve", str(tiny_model), f"--listen={address}", stderr=stderr) as launcher,
    ):
        assert launcher.stdout is not None
        launcher.stdout.close()
        async with make_channel(address) as channel:
            await wait_until_serving(channel)
            # Until now its log was not read; from now on writing it fails.
            os.close(reader)
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            assert [response async for response in stub.Generate(text_request("Hello", max_tokens=3))]
        launcher.terminate()
        assert launcher.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--listen=nowhere"], "--listen"),
        (["--listen=0.0.0.0:50051"], "--listen"),
        (["--log-level=loud"], "--log-level"),
        (["--worker.listen=unix:/tmp/x"], "--worker.listen"),
        (["--exit-after-prompt"], "--exit-after-prompt"),
        (["--workers=unix:/tmp/x", "--worker.ops-backend=cpu"], "--worker.X"),
        (["--workers=unix:/tmp/x", "--tp=2"], "--tp"),
    ],
)
def test_the_launcher_names_a_setting_it_refuses(arguments: list[str], name: str) -> None:
    result = run_serve("a-model", *arguments)

    assert result.returncode == 2
    assert f"error: {name}" in result.stderr.replace("lockstep serve: ", "").replace("argument ", "")


@pytest.mark.parametrize("flag", ["--listen", "--scheduler-listen", "--worker.manage-listen"])
def test_a_taken_port_is_told_before_anything_starts(tiny_model: Path, flag: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"

        line = refused(str(tiny_model), free_address(), f"{flag}={address}")

    assert line == f"error: cannot listen on {address}: Address already in use"


def test_a_model_directory_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert (
        refused(str(tmp_path), free_address()) == f"error: {tmp_path} is not a model directory: it has no config.json"
    )


def test_a_draft_model_that_is_none_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert (
        refused(str(tiny_model), free_address(), f"--draft-model={missing}") == f"error: {missing} is not a directory"
    )


def test_a_cell_can_be_of_workers_that_were_started_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    worker = start_service("worker", f"--model-dir={tiny_model}", f"--listen={address}")
    with worker, start_cell(tiny_model, f"--workers={address}") as cell:
        with cell.stub() as stub:
            responses = list(stub.Generate(text_request("Hello", max_tokens=3, ignore_eos=True)))

        assert sum(len(response.token_ids) for response in responses) == 3
        assert set(cell.role_to_process) == {"scheduler", "tokenizer"}


def test_a_prompt_is_answered_on_stdout_before_the_launcher_ends(real_model: Path, tmp_path: Path) -> None:
    prompt = "Say hello."
    listen = f"--listen=unix:{tmp_path / 'tokenizer.sock'}"

    result = run_serve(str(real_model), listen, f"--prompt={prompt}", "--exit-after-prompt")

    assert result.returncode == 0, result.stderr
    ready, _, rest = result.stdout.partition("\n")
    assert ready.startswith("ready: serving")
    question, answer = rest.strip().split("\n", maxsplit=1)
    assert question == f"> {prompt}"
    assert re.search(r"\[\d+ tokens, ended by .* [\d.]+ tokens/s\]$", answer.strip())
    # The worker says what it computes in.
    assert re.search(r"the model is loaded weights=\S+ dtype=\w+ backend=\w+ .*threads=\d+ seconds=", result.stderr)
    assert prompt not in result.stderr


def test_an_idle_cell_uses_little_of_a_core(real_cell: Cell) -> None:
    processes = [psutil.Process(real_cell.launcher.pid), *real_cell.role_to_process.values()]

    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    with pytest.raises(subprocess.TimeoutExpired):
        real_cell.launcher.wait(IDLE_S)
    used_s = sum(sum(process.cpu_times()[:2]) for process in processes) - before

    # Heartbeats go both ways on two links, about twice a second.
    assert used_s < 0.03 * IDLE_S
