"""The stages of a cell's processes: when each reached one, by its own log, and the processor time until then."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_environment, python_command

ATTACHED = "attached to the scheduler"
# The log's lines that end a stage, and what the stage is called.
_STAGES = {
    "settings": "interpreter, settings",
    "packed weights are kept in a file": "imports, weights read and packed, file written",
    "packed weights are read from a file": "imports, packed file mapped and checked",
    "the model is loaded": "model built",
    "serving": "ready to be called",
    "attached": ATTACHED,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """The end of a stage of a process."""

    process: str
    """`tokenizer`, `scheduler` or `worker`."""
    name: str
    began_at: float
    """When the process began, in seconds since the epoch."""
    since_start_s: float
    cpu_s: float
    """The process's own, threads included."""


class StagedCell:
    """A running `lockstep serve` of one worker, with the stages of its processes so far."""

    def __init__(self, launcher: subprocess.Popen[str], address: str) -> None:
        self.launcher = launcher
        self.address = address
        self.stages: list[Stage] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, stage: str, num_seen: int) -> None:
        """Return once one of the stages after the first `num_seen` is this one: the log comes through a pipe."""
        while not any(each.name == stage for each in self.stages[num_seen:]):
            time.sleep(0.01)

    def worker(self) -> psutil.Process:
        """The worker's process at this moment."""
        return self._find("worker")

    def _find(self, role: str) -> psutil.Process:
        children = psutil.Process(self.launcher.pid).children(recursive=True)
        found = [each for each in children if f"services.{role}" in each.cmdline()]
        # The one that began last: a killed one may not have been waited for yet.
        return max(found, key=lambda process: process.create_time())

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for line in self.launcher.stderr:
            record = json.loads(line) if line.startswith("{") else {}
            name = _STAGES.get(record.get("message", ""))
            if name is None:
                continue
            try:
                process = self._find(record["service"])
                times, created_at = process.cpu_times(), process.create_time()
            except (psutil.NoSuchProcess, ValueError):
                continue
            since_start_s = record["time"] - created_at
            cpu_s = times.user + times.system
            self.stages.append(Stage(record["service"], name, created_at, since_start_s, cpu_s))


@contextmanager
def start_staged(model_dir: Path, flags: Sequence[str], root: Path = ROOT) -> Iterator[StagedCell]:
    """Start a cell; gives it once it is ready, and ends it."""
    address = f"127.0.0.1:{free_port()}"
    command = ["-m", "services.cli", "serve", str(model_dir), f"--listen={address}", "--log-format=json", *flags]
    with subprocess.Popen(
        python_command(*command),
        env=module_environment(root),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            cell = StagedCell(launcher, address)
            assert launcher.stdout is not None
            if not launcher.stdout.readline():
                raise SystemExit(f"error: the cell of {model_dir} did not start")
            yield cell
        finally:
            launcher.terminate()
            launcher.wait(PATIENCE_S)
