"""The stages of a cell's processes: when each reached one, by its own log, and the processor time until then."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
_SPARE_WAITS, _LOST = "a spare worker waits", "the link to the worker broke"


@dataclass(frozen=True, slots=True)
class Stage:
    """The end of a stage of a process."""

    process: str
    """`tokenizer`, `scheduler` or `worker`."""
    name: str
    began_at: float
    """When the process began, or a spare became one, in seconds since the epoch."""
    since_start_s: float
    cpu_s: float
    """The process's own since then, threads included."""


@dataclass(frozen=True, slots=True)
class _Start:
    process: psutil.Process
    began_at: float
    cpu_s: float
    """What the process had used before."""


class StagedCell:
    """A running `lockstep serve` of one worker, with the stages of its processes so far."""

    def __init__(self, launcher: subprocess.Popen[str], address: str) -> None:
        self.launcher = launcher
        self.address = address
        self.stages: list[Stage] = []
        self._num_spares = self._num_losses = 0
        self._role_to_start: dict[str, _Start] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, stage: str, num_seen: int) -> None:
        """Return once one of the stages after the first `num_seen` is this one: the log comes through a pipe."""
        while not any(each.name == stage for each in self.stages[num_seen:]):
            time.sleep(0.01)

    def wait_for_spares(self, number: int) -> None:
        """Return once so many spare workers have waited since the start."""
        while self._num_spares < number:
            time.sleep(0.01)

    def kill_worker(self) -> None:
        """Kill the worker; returns once the scheduler knows."""
        num_losses = self._num_losses
        self._role_to_start["worker"].process.kill()
        while self._num_losses == num_losses:
            time.sleep(0.01)

    def reach(self, process: str, name: str, at: float) -> Stage:
        """The stage that a process ends at this moment, `at` in seconds since the epoch."""
        start = self._role_to_start[process]
        return Stage(process, name, start.began_at, at - start.began_at, _cpu_s(start.process) - start.cpu_s)

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for line in self.launcher.stderr:
            record = json.loads(line) if line.startswith("{") else {}
            message = record.get("message", "")
            self._num_spares += message == _SPARE_WAITS
            self._num_losses += message == _LOST
            # The end of one that was killed may be seen before the line of its stage.
            with suppress(psutil.NoSuchProcess):
                if message == "started":
                    process = psutil.Process(record["pid"])
                    is_spare = record.get("was_spare", False)
                    start = (record["time"], _cpu_s(process)) if is_spare else (process.create_time(), 0.0)
                    self._role_to_start[record["role"]] = _Start(process, *start)
                elif (name := _STAGES.get(message)) is not None and record["service"] in self._role_to_start:
                    self.stages.append(self.reach(record["service"], name, record["time"]))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


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
