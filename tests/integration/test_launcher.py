"""`lockstep serve` as a person or a script meets it: how it starts, stops, and tells what went wrong."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.cell import Cell, free_port, popen_lockstep, run_serve, start_cell

ROLES = ("worker", "scheduler", "tokenizer")
IDLE_S = 10.0


def wait_for_exits(processes: list[psutil.Process]) -> list[int]:
    """Wait until all have ended; their ids in the order of their ends."""
    order: list[int] = []
    poll = select.poll()
    pidfd_to_pid = {os.pidfd_open(process.pid): process.pid for process in processes}
    for pidfd in pidfd_to_pid:
        poll.register(pidfd, select.POLLIN)
    while len(order) < len(processes):
        for pidfd, _ in poll.poll():
            order.append(pidfd_to_pid[pidfd])
            poll.unregister(pidfd)
            os.close(pidfd)
    return order


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
        cell.launcher.send_signal(signal_number)

        order = wait_for_exits(list(cell.role_to_process.values()))

        assert order == [cell.role_to_process[role].pid for role in ("tokenizer", "scheduler", "worker")]
        assert cell.wait() == 0
        assert_nothing_is_left(cell, runtime_dir)


def test_ctrl_c_in_a_terminal_reaches_the_launcher_alone(tiny_model: Path) -> None:
    with start_cell(tiny_model) as cell:
        launcher_session = os.getsid(cell.launcher.pid)
        sessions = {os.getsid(process.pid) for process in cell.role_to_process.values()}
        assert launcher_session not in sessions
        assert len(sessions) == len(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_a_service_that_dies_is_named_and_ends_the_others(tiny_model: Path, role: str) -> None:
    with start_cell(tiny_model) as cell:
        runtime_dir = cell.runtime_dir
        cell.role_to_process[role].kill()

        assert cell.wait() == 1
        assert f"error: the {role} was killed by SIGKILL" in cell.log()
        assert_nothing_is_left(cell, runtime_dir)


def test_services_do_not_outlive_a_launcher_that_is_killed(tiny_model: Path) -> None:
    with start_cell(tiny_model) as cell:
        services = list(cell.role_to_process.values())
        cell.launcher.kill()

        assert len(wait_for_exits(services)) == len(ROLES)


def test_a_signal_while_the_services_start_stops_them_cleanly(tiny_model: Path) -> None:
    with popen_lockstep("serve", str(tiny_model), free_address()) as launcher:
        assert launcher.stderr is not None
        while "started role=tokenizer" not in (line := launcher.stderr.readline()):
            assert line, "the launcher ended before it had started the services"
        launcher.terminate()
        _, log = launcher.communicate()
        assert launcher.returncode == 0, log


@pytest.mark.parametrize("role", ROLES)
def test_a_service_refuses_a_flag_it_does_not_know(tiny_model: Path, role: str) -> None:
    result = run_serve(str(tiny_model), free_address(), f"--{role}.no-such-flag=1")

    assert result.returncode == 1
    assert "--no-such-flag" in result.stderr
    assert f"error: the {role} exited with code 2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--listen=nowhere"], "--listen"),
        (["--listen=0.0.0.0:50051"], "--listen"),
        (["--log-level=loud"], "--log-level"),
        (["--worker.listen=unix:/tmp/x"], "--worker.listen"),
        (["--exit-after-prompt"], "--exit-after-prompt"),
    ],
)
def test_the_launcher_names_a_setting_it_refuses(arguments: list[str], name: str) -> None:
    result = run_serve("a-model", *arguments)

    assert result.returncode == 2
    assert f"error: {name}" in result.stderr.replace("lockstep serve: ", "").replace("argument ", "")


def test_a_taken_port_is_told_and_ends_everything(tiny_model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"

        result = run_serve(str(tiny_model), f"--listen={address}")

    assert result.returncode == 1
    assert address in result.stderr
    assert "error: the tokenizer exited with code" in result.stderr


def test_a_model_directory_that_is_none_is_named(tmp_path: Path) -> None:
    result = run_serve(str(tmp_path), free_address())

    assert result.returncode == 1
    assert str(tmp_path / "config.json") in result.stderr


def test_a_prompt_is_answered_on_stdout_before_the_launcher_ends(real_model: Path, tmp_path: Path) -> None:
    prompt = "Say hello."
    listen = f"--listen=unix:{tmp_path / 'tokenizer.sock'}"

    result = run_serve(str(real_model), listen, f"--prompt={prompt}", "--exit-after-prompt")

    assert result.returncode == 0, result.stderr
    ready, _, rest = result.stdout.partition("\n")
    assert ready.startswith("ready: serving")
    question, answer = rest.strip().split("\n", maxsplit=1)
    assert question == f"> {prompt}"
    assert len(answer.strip()) > 0
    assert prompt not in result.stderr


def test_an_idle_cell_uses_less_than_a_hundredth_of_a_core(real_cell: Cell) -> None:
    processes = [psutil.Process(real_cell.launcher.pid), *real_cell.role_to_process.values()]

    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    with pytest.raises(subprocess.TimeoutExpired):
        real_cell.launcher.wait(IDLE_S)
    used_s = sum(sum(process.cpu_times()[:2]) for process in processes) - before

    assert used_s < 0.01 * IDLE_S
