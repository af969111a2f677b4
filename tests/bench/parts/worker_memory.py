"""The private memory of a worker process: what it has written to. Files that it reads are in the system's own cache."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from pathlib import Path

import psutil

from tests.support.system.processes import ROOT, module_environment, python_command

_SAMPLE_S = 0.01
_IMPORT = """
import services.worker.__main__
import services.worker.runner.model_runner
print(open("/proc/self/smaps_rollup").read())
"""


def private_bytes(pid: int) -> int:
    """The private memory of a process, from smaps_rollup.

    Raises:
        OSError: The process does not exist.
    """
    return _parse(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))


def importing_bytes() -> int:
    """The private memory of a process that has only imported the worker."""
    command = python_command("-c", _IMPORT)
    environment = module_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return _parse(done.stdout)


def _parse(rollup: str) -> int:
    lines = [line.split() for line in rollup.splitlines()]
    return next(int(line[1]) * 1024 for line in lines if line and line[0] == "Private_Dirty:")


class MemoryWatch:
    """Samples the private memory of the worker that this process starts while the context is active.

    Attributes:
        peak: The most that it had, in bytes.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._older = set(psutil.Process().children(recursive=True))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pid = None
        while not self._stop.wait(_SAMPLE_S):
            pid = pid or self._find_worker()
            # It may end at any moment.
            with contextlib.suppress(OSError):
                self.peak = max(self.peak, private_bytes(pid) if pid else 0)

    def _find_worker(self) -> int | None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process not in self._older and "services.worker" in process.cmdline():
                    return int(process.pid)
        return None
