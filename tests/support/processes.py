"""Processes of this checkout's modules: the environment that they get, and those that answer line by line."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What a process runs first; it is told when its terminal goes, even if the test run is not, as under `nohup`. Not a
# `preexec_fn`: with gRPC's handlers of forks some children die before they begin.
_BEGIN = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, sys.argv[1])
from shared.parent import make_end_with_parent
make_end_with_parent(int(sys.argv[2]))()
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def python_command(*args: str) -> list[str]:
    """The command that runs Python as a process that ends with this one, however that ends."""
    return [sys.executable, "-I", "-S", "-c", _BEGIN, str(ROOT), str(os.getpid()), *args]


def module_command(module: str, *args: str) -> list[str]:
    """The command that runs a module of this checkout, as a process that ends with this one, however that ends."""
    return python_command("-m", module, *args)


def module_environment() -> dict[str, str]:
    """What a module of this checkout needs, without the settings of whoever runs the tests: they are not for it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    return environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}


@contextmanager
def start_service(role: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A service that no launcher knows of, which will serve after a while; it is killed at the end, also if stopped."""
    with subprocess.Popen(module_command(f"services.{role}", *flags), cwd=ROOT, env=module_environment()) as process:
        try:
            yield process
        finally:
            process.kill()


class LineProcesses:
    """Processes that read a line and answer one, kept from one line to the next: starting one costs seconds."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        """Take the module that they run, with its number as its argument; they are started when first asked."""
        self._module = module
        self._environment = {**module_environment(), **(environment or {})}
        self._processes: list[subprocess.Popen[str]] = []

    def ask(self, lines: Sequence[str]) -> list[str]:
        """Give each line to a process of its own; returns their answers.

        Raises:
            RuntimeError: one of them ended instead. All are ended then: the others may wait for it.
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
        """End them."""
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
