"""A whole cell under test: `lockstep serve` as a process of its own, with all that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import grpc
import psutil

from lockstep.v1 import tokenizer_pb2_grpc
from shared.health import wait_until_serving
from shared.rpc import make_channel
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.processes import ROOT, module_command, module_environment

_POLL_S = 0.02


class Cell:
    """A running `lockstep serve` and its services. `start_cell` makes one and ends it.

    A service is called as `lockstep serve` calls it: by its role, and of several workers `worker DP.TP`.

    Attributes:
        address: Where its tokenizer service answers.
        scheduler_address: Where its scheduler service answers: a socket in the launcher's private directory.
        cell_address: Where its scheduler service answers operators.
        ready_line: What it wrote on stdout when it was ready.
        launcher: The process of `lockstep serve`; its stdout is a pipe, read up to the line that says ready.
        role_to_process: The services' processes when it was ready, by what they are called.
    """

    def __init__(self, address: str, launcher: subprocess.Popen[str], log_path: Path) -> None:
        self.address = address
        self.launcher = launcher
        self._log_path = log_path
        self.ready_line = ""
        self._wait_until_ready()
        self.role_to_process = self.find_processes()
        self._name_to_address = {
            name: _flag(process.cmdline(), "listen") for name, process in self.role_to_process.items()
        }
        self.scheduler_address = self._name_to_address["scheduler"]
        self.cell_address = _flag(self.role_to_process["scheduler"].cmdline(), "cell-listen")

    @property
    def runtime_dir(self) -> Path:
        """The launcher's private directory."""
        return Path(self.scheduler_address.removeprefix("unix:")).parent

    @property
    def temp_dir(self) -> str:
        """What its launcher has as TMPDIR."""
        return str(self._log_path.parent)

    def find_processes(self) -> dict[str, psutil.Process]:
        """The services' processes at this moment, by what they are called; those that have exited are missing."""
        processes = {}
        for child in psutil.Process(self.launcher.pid).children():
            # It may end at any moment; one that is only just starting is still the launcher's image.
            with contextlib.suppress(psutil.Error):
                command = child.cmdline()
                if child.status() != psutil.STATUS_ZOMBIE and (name := _name_of(command)) is not None:
                    processes[name] = child
        return processes

    def send_signal(self, name: str, signal_number: int) -> int:
        """Send a service a signal; returns the id of its process.

        Raises:
            KeyError: it is not running.
        """
        process = self.find_processes()[name]
        process.send_signal(signal_number)
        pid: int = process.pid
        return pid

    def kill(self, name: str) -> int:
        """End a service as `kill -9` does; returns the id that its process had."""
        return self.send_signal(name, signal.SIGKILL)

    async def wait_until_serving(self, name: str, *, instead_of: int | None = None) -> None:
        """Wait until a service says that it serves; fails after five minutes.

        Args:
            name: What it is called.
            instead_of: Wait for a process with another id than this.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                process = self.find_processes().get(name)
                if process is not None and process.pid != instead_of:
                    break
                await asyncio.sleep(_POLL_S)
            async with make_channel(self._name_to_address[name], internal=True) as channel:
                await wait_until_serving(channel)

    def log(self) -> str:
        """What the launcher and the services wrote to stderr so far."""
        return self._log_path.read_text(encoding="utf-8")

    def wait_for_log(self, text: str) -> None:
        """Wait until the launcher or a service has written a text to stderr; fails after five minutes."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log():
            assert time.monotonic() < deadline, f"nobody wrote {text!r}"
            time.sleep(_POLL_S)

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
        return self.launcher.wait(PATIENCE_S)

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
    environment = module_environment()
    if temp_dir is not None:
        environment["TMPDIR"] = temp_dir
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.Popen(
        module_command("shared.cli", *args), cwd=ROOT, env=environment, stderr=stderr, text=True, **options
    )


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep serve` with arguments that make it end by itself."""
    with popen_lockstep("serve", *args) as launcher:
        try:
            stdout, stderr = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.kill()
    return subprocess.CompletedProcess(args, launcher.returncode, stdout, stderr)


def _name_of(command: list[str]) -> str | None:
    """What the service is called that a process runs; None when it runs none."""
    if "-m" not in command or not (module := command[command.index("-m") + 1]).startswith("services."):
        return None
    role = module.removeprefix("services.")
    if any(flag.startswith("--dp-rank=") for flag in command):
        return f"{role} {_flag(command, 'dp-rank')}.{_flag(command, 'tp-rank')}"
    return role


def _flag(command: list[str], name: str) -> str:
    """The value of a flag that `lockstep serve` set."""
    return next(flag.partition("=")[2] for flag in command if flag.startswith(f"--{name}="))
