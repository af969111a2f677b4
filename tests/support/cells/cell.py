"""A whole cell under test: `lockstep serve` as a separate process, with the services it starts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import aiohttp
import grpc
import psutil

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_command, module_environment, running_children
from tests.support.system.serving import wait_until_serving

_POLL_S = 0.02
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)

# Each row is computed alone, so an answer depends only on its request.
REFERENCE = "--worker.ops-backend=reference"

# The fast kernels compute as transformers does, instead of with what they choose.
FLOAT32 = ("--worker.dtype=float32", "--worker.quantization=none")


_SPARE = "services.worker.spare"


class Cell:
    """A running `lockstep serve` and its services. `start_cell` makes one and ends it.

    A service is named as in `lockstep serve`: by its role, or `worker DP.TP` if there are several workers.

    Attributes:
        address: The address of its tokenizer service.
        scheduler_address: The address of its scheduler service, a socket in the launcher's private directory.
        cell_address: The address of its scheduler service for operators.
        ready_line: The line it wrote to stdout when it was ready.
        launcher: The process of `lockstep serve`; its stdout is a pipe, read up to the ready line.
        role_to_process: The services' processes when it was ready, by name.
    """

    def __init__(self, address: str, launcher: subprocess.Popen[str], log_path: Path) -> None:
        self.address = address
        self.launcher = launcher
        self._log_path = log_path
        self.ready_line = ""
        self._wait_until_ready()
        self.role_to_process = self.find_processes()
        self.name_to_address = {
            name: _flag(process.cmdline(), "listen") for name, process in self.role_to_process.items()
        }
        self.scheduler_address = self.name_to_address["scheduler"]
        self.cell_address = _flag(self.role_to_process["scheduler"].cmdline(), "cell-listen")
        self._tokenizer_command = self.role_to_process["tokenizer"].cmdline()

    @property
    def runtime_dir(self) -> Path:
        """The launcher's private directory."""
        return Path(self.scheduler_address.removeprefix("unix:")).parent

    @property
    def temp_dir(self) -> str:
        """The launcher's TMPDIR."""
        return str(self._log_path.parent)

    def find_processes(self) -> dict[str, psutil.Process]:
        """The services' processes at this moment, by name; those that have exited are missing."""
        processes = {}
        for child, command in running_children(self.launcher.pid).items():
            name = self._name_of_spare(child.pid) if _SPARE in command else _name_of(command)
            if name is not None:
                processes[name] = child
        return processes

    def find_spares(self) -> list[psutil.Process]:
        """The spare workers at this moment, those that still import too."""
        children = running_children(self.launcher.pid).items()
        return [child for child, command in children if _SPARE in command and self._name_of_spare(child.pid) is None]

    def send_signal(self, name: str, signal_number: int) -> int:
        """Send a signal to a service; returns its process id.

        Raises:
            KeyError: It is not running.
        """
        process = self.find_processes()[name]
        process.send_signal(signal_number)
        pid: int = process.pid
        return pid

    def kill(self, name: str) -> int:
        """Kill a service with SIGKILL; returns the process id it had."""
        return self.send_signal(name, signal.SIGKILL)

    async def wait_until_serving(self, name: str, *, instead_of: int | None = None) -> None:
        """Wait until a service reports SERVING; fails after five minutes.

        Args:
            instead_of: Wait for a process with a different id than this.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                process = self.find_processes().get(name)
                if process is not None and process.pid != instead_of:
                    break
                await asyncio.sleep(_POLL_S)
            async with make_channel(self.name_to_address[name], internal=True) as channel:
                await wait_until_serving(channel)

    def log(self) -> str:
        """What the launcher and the services have written to stderr so far."""
        return self._log_path.read_text(encoding="utf-8")

    def wait_for_log(self, text: str) -> None:
        """Wait until `text` is in the log of the launcher and the services; fails after five minutes."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log():
            assert time.monotonic() < deadline, f"{text!r} was never logged"
            time.sleep(_POLL_S)

    def open_channel(self) -> grpc.Channel:
        """A blocking channel to the tokenizer service; the caller closes it. `make_channel` makes async ones."""
        return grpc.insecure_channel(self.address)

    @contextlib.contextmanager
    def stub(self) -> Iterator[tokenizer_pb2_grpc.TokenizerServiceStub]:
        """A blocking stub of the tokenizer service, on a channel of its own."""
        with self.open_channel() as channel:
            yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)

    @property
    def http_address(self) -> str:
        """The address of its HTTP API. It must have one."""
        return _flag(self._tokenizer_command, "http-listen")

    def http_session(self) -> aiohttp.ClientSession:
        """A client of the HTTP API, which opens as many connections as it needs; the caller closes it."""
        address = self.http_address
        if address.startswith("unix:"):
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(address.removeprefix("unix:"), limit=0)
            address = "localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(f"http://{address}", connector=connector, timeout=_NO_TIMEOUT)

    def wait(self) -> int:
        """Wait for the launcher to end; returns its exit code."""
        return self.launcher.wait(PATIENCE_S)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send the launcher a signal and wait for it to end; returns its exit code."""
        self.launcher.send_signal(signal_number)
        return self.wait()

    def _name_of_spare(self, pid: int) -> str | None:
        """The name of the worker that a spare has become, which its command does not say; None if it waits."""
        found = re.search(rf"started role=(worker)(?: rank=(\S+))? pid={pid} was_spare=True", self.log())
        return None if found is None else " ".join(filter(None, found.groups()))

    def _wait_until_ready(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            if line.startswith("ready"):
                self.ready_line = line
                return
        raise RuntimeError(f"lockstep serve ended with {self.wait()} before it was ready:\n{self.log()}")


@contextlib.contextmanager
def start_cell(model_dir: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Cell]:
    """Start a cell on a free port, wait until it is ready, and stop it at the end.

    Args:
        flags: More of `lockstep serve`'s flags, such as `--worker.ops-backend=reference`.
        environment: As for `popen_lockstep`.

    Raises:
        RuntimeError: It did not become ready or did not stop cleanly; the message includes its log. It is not raised if
            the test ended the cell.
    """
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as temp_dir:
        log_path = Path(temp_dir) / "log"
        with log_path.open("w") as log:
            # Removed with everything that a killed launcher leaves in it.
            command = ("serve", str(model_dir), f"--listen={address}", *flags)
            launcher = popen_lockstep(*command, stderr=log, temp_dir=temp_dir, environment=environment)
        try:
            cell = Cell(address, launcher, log_path)
            yield cell
            if launcher.poll() is None and (exit_code := cell.stop()) != 0:
                raise RuntimeError(f"lockstep serve stopped with {exit_code}:\n{cell.log()}")
        except BaseException:
            # pytest shows it with the failure.
            sys.stderr.write(log_path.read_text(encoding="utf-8"))
            raise
        finally:
            # Its services end with it.
            launcher.kill()
            launcher.communicate()


@contextlib.asynccontextmanager
async def held_work(cell_address: str) -> AsyncIterator[None]:
    """Have a cell of one rank compute nothing meanwhile, so that requests wait; its scheduler is at `cell_address`."""
    async with make_channel(cell_address, internal=True) as channel:
        admin: Any = scheduler_pb2_grpc.SchedulerAdminServiceStub(channel)
        await admin.Drain(scheduler_pb2.DrainRequest(dp_rank=0))
        yield
        await admin.Undrain(scheduler_pb2.UndrainRequest(dp_rank=0))


def find_cell_processes(address: str) -> list[psutil.Process]:
    """The launcher and services of the cell whose tokenizer listens on `address`.

    Raises:
        LookupError: There is none on this machine.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "services.tokenizer" in command and f"--listen={address}" in command:
                launcher = process.parent()
                return [launcher, *launcher.children()]
    raise LookupError(f"no cell on this machine listens on {address}")


def popen_lockstep(
    *args: str,
    stderr: IO[str] | int = subprocess.PIPE,
    temp_dir: str | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start the `lockstep` command; stdout is a pipe, and stderr too unless given.

    Args:
        environment: Variables beside those of every module.
    """
    variables = {**module_environment(), **(environment or {})}
    if temp_dir is not None:
        variables["TMPDIR"] = temp_dir
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.Popen(
        module_command("services.cli", *args), cwd=ROOT, env=variables, stderr=stderr, text=True, **options
    )


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep serve` to its end, with arguments that make it exit by itself."""
    with popen_lockstep("serve", *args) as launcher:
        try:
            stdout, stderr = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.kill()
    return subprocess.CompletedProcess(args, launcher.returncode, stdout, stderr)


def _name_of(command: list[str]) -> str | None:
    """The name of the service with this command line; None if it is not a service."""
    if "-m" not in command or not (module := command[command.index("-m") + 1]).startswith("services."):
        return None
    role = module.removeprefix("services.")
    if any(flag.startswith("--dp-rank=") for flag in command):
        return f"{role} {_flag(command, 'dp-rank')}.{_flag(command, 'tp-rank')}"
    return role


def _flag(command: list[str], name: str) -> str:
    return next(flag.partition("=")[2] for flag in command if flag.startswith(f"--{name}="))
