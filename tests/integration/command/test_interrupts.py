"""The processes of a launcher or test run end with it, however it is interrupted."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.support.cells.cell import popen_lockstep
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_command, module_environment

# SIGHUP comes when its terminal goes.
SIGNALS = [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL]

# The code of a test run that starts a service, and a launcher that starts more.
TEST_RUN = """
import sys
from tests.support.cells.cell import popen_lockstep
from tests.support.system.processes import start_service
model_dir, temp_dir = sys.argv[1:]
with start_service("scheduler", f"--listen=unix:{temp_dir}/alone"):
    with popen_lockstep("serve", model_dir, f"--listen=unix:{temp_dir}/cell", stderr=sys.stderr) as launcher:
        launcher.wait()
"""


def listen() -> str:
    return f"--listen=127.0.0.1:{free_port()}"


def descendants(pid: int) -> list[psutil.Process]:
    processes: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return processes


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


def wait_until_started(log: IO[str], mark: str = "started role=tokenizer") -> None:
    while mark not in (line := log.readline()):
        assert line, "the launcher ended before it had started the services"


@pytest.mark.parametrize("number", SIGNALS)
def test_while_its_services_start(tiny_model: Path, number: signal.Signals) -> None:
    with popen_lockstep("serve", str(tiny_model), listen()) as launcher:
        assert launcher.stderr is not None
        wait_until_started(launcher.stderr)
        services = descendants(launcher.pid)
        launcher.send_signal(number)
        launcher.send_signal(number)
        _, log = launcher.communicate(timeout=PATIENCE_S)

    assert len(services) == 3
    assert_all_end(services)
    if number is signal.SIGKILL:
        assert launcher.returncode == -signal.SIGKILL
    else:
        assert launcher.returncode == 0, log
        assert log.splitlines()[-1].endswith("serve: ended reason=asked to stop")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_while_it_checks_what_it_was_told(tiny_model: Path, number: signal.Signals) -> None:
    with popen_lockstep("serve", str(tiny_model), listen()) as launcher:
        while not (children := descendants(launcher.pid)):
            assert launcher.poll() is None
        launcher.send_signal(number)
        _, log = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0), log
    assert "started" not in log
    assert_all_end(children)


# Without the log a person is told once a service is ready, and all have been started before.
@pytest.mark.parametrize(("flags", "mark"), [(["--verbose"], "started role=tokenizer"), ([], " ready after ")])
def test_when_its_terminal_goes(tiny_model: Path, tmp_path: Path, flags: list[str], mark: str) -> None:
    person, program = pty.openpty()
    command = ("serve", str(tiny_model), listen(), *flags)
    with popen_lockstep(*command, stdout=program, stderr=program, temp_dir=str(tmp_path)) as launcher:
        os.close(program)
        with os.fdopen(person, errors="replace") as terminal:
            wait_until_started(terminal, mark)
        # Its writes fail from now on; the kernel sends SIGHUP to the terminal's processes.
        services = descendants(launcher.pid)
        launcher.send_signal(signal.SIGHUP)
        assert launcher.wait(PATIENCE_S) == 0
    assert_all_end(services)


def test_a_test_run_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEST_RUN, str(tiny_model), str(tmp_path)]
    environment = module_environment() | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        wait_until_started(run.stderr)
        processes = descendants(run.pid)
        run.kill()

    assert len(processes) == 5
    assert_all_end(processes)


def test_a_process_whose_starter_is_gone_never_begins(tmp_path: Path) -> None:
    command = module_command("http.server", "--help")
    # As if the starter had ended and the process had been reparented.
    command[command.index(str(os.getpid()))] = str(os.getppid())

    assert subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout == b""
