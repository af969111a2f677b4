"""Processes that run modules of this checkout: their environment, and ones that answer line by line."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]

# With this environment the backend `native` of a worker cannot be built, and `cpu` takes over.
WITHOUT_COMPILER = {"PATH": ""}

# The first code of a process. It restores SIGHUP, which the test run may ignore, for example under `nohup`. It is not a
# `preexec_fn`, because with gRPC's fork handlers some children die before they start.
_BEGIN = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, sys.argv[1])
from shared.process.parent import make_end_with_parent
make_end_with_parent(int(sys.argv[2]))()
os.execv(sys.argv[3], sys.argv[3:])
"""


def python_command(*args: str) -> list[str]:
    """The command that runs Python as a process that ends when this one ends, in whatever way."""
    return program_command(sys.executable, *args)


def program_command(program: str, *args: str) -> list[str]:
    """The same for any program, by its path."""
    return [sys.executable, "-I", "-S", "-c", _BEGIN, str(ROOT), str(os.getpid()), program, *args]


def module_command(module: str, *args: str) -> list[str]:
    """The command that runs a module of this checkout as a process that ends when this one ends."""
    return python_command("-m", module, *args)


def module_environment(root: Path = ROOT) -> dict[str, str]:
    """The environment for a module of a checkout or an unpacked wheel, without the developer's LOCKSTEP_ settings.

    Its workers neither read nor fill the developer's packed weights, and its cells serve HTTP only where a flag says
    so: their default port is one for all tests.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    environment |= {"LOCKSTEP_WORKER_PACKED_CACHE": "false", "LOCKSTEP_SERVE_HTTP": "false"}
    return environment | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "protos")])}


@contextmanager
def start_service(
    role: str, *flags: str, log: Path | None = None, root: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a service without a launcher and without waiting for it; it is killed at the end, even if stopped.

    It logs to the stderr of the test, or appends to the file `log`. Its modules are those in `root`.
    """
    with start_module(f"services.{role}", *flags, log=log, root=root) as process:
        yield process


@contextmanager
def start_module(
    module: str, *flags: str, log: Path | None = None, root: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """As `start_service`, for a module that runs a service."""
    command = module_command(module, *flags)
    with ExitStack() as stack:
        stderr = None if log is None else stack.enter_context(log.open("ab"))
        process = stack.enter_context(subprocess.Popen(command, cwd=root, env=module_environment(root), stderr=stderr))
        try:
            yield process
        finally:
            process.kill()


def running_children(pid: int | None = None) -> dict[psutil.Process, list[str]]:
    """The children of a process, by default of this one, and their commands; one that is about to end may be missing.

    A child that was only just forked still has its parent's command.
    """
    running = {}
    for child in psutil.Process(pid).children():
        # It may end at any moment, also between the calls.
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if child.status() != psutil.STATUS_ZOMBIE:
                running[child] = command
    return running


class LineProcesses:
    """Processes that answer each line with a line, kept alive between lines because starting one takes seconds."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        """Prepare processes of a module, each with its number as its argument; they start when first needed."""
        self._module = module
        self._environment = {**module_environment(), **(environment or {})}
        self._processes: list[subprocess.Popen[str]] = []

    def ask(self, lines: Sequence[str]) -> list[str]:
        """Send each line to a different process, and return their answers.

        Raises:
            RuntimeError: One of them ended instead. All are then killed, since the others may be waiting for it.
        """
        while len(self._processes) < len(lines):
            self._start()
        asked = self._processes[: len(lines)]
        for process, line in zip(asked, lines, strict=True):
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(asked):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (number, process.stdout))
            while len(answers) < len(lines):
                for key, _ in selector.select():
                    number, output = key.data
                    answers[number] = output.readline()
                    if not answers[number]:
                        self.close()
                        raise RuntimeError("a process ended: its error is on stderr")
        return [answers[number] for number in range(len(lines))]

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes.clear()

    def _start(self) -> None:
        command = module_command(self._module, str(len(self._processes)))
        self._processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )


def is_signal_blocked(pid: int, number: int) -> bool:
    """Whether a process's main thread blocks a signal. Source: proc(5), /proc/pid/status, SigBlk."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return bool(mask >> (number - 1) & 1)
