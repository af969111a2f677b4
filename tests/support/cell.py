"""A whole cell under test: `lockstep serve` as a process of its own, with all that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import grpc
import psutil

from lockstep.v1 import tokenizer_pb2_grpc

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 60.0


class Cell:
    """A running `lockstep serve` and its services. `start_cell` makes one and ends it.

    Attributes:
        address: Where its tokenizer service answers.
        ready_line: What it wrote on stdout when it was ready.
        launcher: The process of `lockstep serve`; its stdout is a pipe, read up to the line that says ready.
        role_to_process: The services' processes, by role.
    """

    def __init__(self, address: str, launcher: subprocess.Popen[str], log_path: Path) -> None:
        self.address = address
        self.launcher = launcher
        self._log_path = log_path
        self.ready_line = ""
        self._wait_until_ready()
        children = psutil.Process(launcher.pid).children()
        self.role_to_process = {_module(child).removeprefix("services."): child for child in children}

    @property
    def scheduler_address(self) -> str:
        """Where its scheduler service answers: a socket in the launcher's private directory."""
        flags: list[str] = self.role_to_process["scheduler"].cmdline()
        return next(flag.removeprefix("--listen=") for flag in flags if flag.startswith("--listen="))

    @property
    def runtime_dir(self) -> Path:
        """The launcher's private directory."""
        return Path(self.scheduler_address.removeprefix("unix:")).parent

    def log(self) -> str:
        """What the launcher and the services wrote to stderr so far."""
        return self._log_path.read_text(encoding="utf-8")

    def open_channel(self) -> grpc.Channel:
        """A blocking channel to the tokenizer service; the caller closes it. `make_channel` makes async ones."""
        return grpc.insecure_channel(self.address)

    @contextlib.contextmanager
    def stub(self) -> Iterator[tokenizer_pb2_grpc.TokenizerServiceStub]:
        """A blocking stub of the tokenizer service, on a channel of its own."""
        with self.open_channel() as channel:
            yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)

    def wait(self) -> int:
        """Wait for the launcher to end; returns its exit code."""
        return self.launcher.wait(STOP_TIMEOUT_S)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ask the launcher to end and wait for it; returns its exit code."""
        self.launcher.send_signal(signal_number)
        return self.wait()

    def _wait_until_ready(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            if line.startswith("ready"):
                self.ready_line = line
                return
        raise RuntimeError(f"lockstep serve ended with {self.wait()} before it was ready:\n{self.log()}")


@contextlib.contextmanager
def start_cell(model_dir: Path, *flags: str) -> Iterator[Cell]:
    """Start a cell on a free port, wait until it is ready, and stop it at the end.

    Args:
        model_dir: The model to serve.
        flags: More of `lockstep serve`'s flags, such as `--worker.ops-backend=reference`.

    Raises:
        RuntimeError: it did not become ready, or did not stop cleanly; the message has its log. A cell that
            the test ended itself is not judged.
    """
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as temp_dir:
        log_path = Path(temp_dir) / "log"
        with log_path.open("w") as log:
            # What a launcher that is killed leaves behind goes with the directory.
            launcher = popen_lockstep(
                "serve", str(model_dir), f"--listen={address}", *flags, stderr=log, temp_dir=temp_dir
            )
        try:
            cell = Cell(address, launcher, log_path)
            yield cell
            if launcher.poll() is None and (exit_code := cell.stop()) != 0:
                raise RuntimeError(f"lockstep serve stopped with {exit_code}:\n{cell.log()}")
        except BaseException:
            # pytest shows it beside what failed.
            sys.stderr.write(log_path.read_text(encoding="utf-8"))
            raise
        finally:
            # Its services die with it.
            launcher.kill()
            launcher.communicate()


def find_cell_processes(address: str) -> list[psutil.Process]:
    """The processes of the cell whose tokenizer listens on `address`: its services and their launcher.

    Raises:
        LookupError: there is none on this machine.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "services.tokenizer" in command and f"--listen={address}" in command:
                launcher = process.parent()
                return [launcher, *launcher.children()]
    raise LookupError(f"no cell of this machine listens on {address}")


def popen_lockstep(
    *args: str, stderr: IO[str] | int = subprocess.PIPE, temp_dir: str | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start the `lockstep` command; its stdout is a pipe, as is its stderr unless given."""
    # The settings of whoever runs the tests must not reach the services.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    if temp_dir is not None:
        environment["TMPDIR"] = temp_dir
    command = [sys.executable, "-m", "shared.cli", *args]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr, text=True, **options)


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep serve` with arguments that make it end by itself."""
    with popen_lockstep("serve", *args) as launcher:
        try:
            stdout, stderr = launcher.communicate(timeout=STOP_TIMEOUT_S)
        finally:
            launcher.kill()
    return subprocess.CompletedProcess(args, launcher.returncode, stdout, stderr)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _module(process: psutil.Process) -> str:
    """The module that a `python -m MODULE` process runs."""
    command: list[str] = process.cmdline()
    return command[command.index("-m") + 1]
