"""The CPU use of other processes, which a benchmark checks before it trusts its own figures."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time since the machine's start, in seconds; only differences are meaningful."""

    wall_s: float
    """Wall-clock time."""
    watched_s: float
    """Used by the watched process."""
    foreign_s: float
    """Used by all other processes except this one, including ended children, and by the host (steal); within 10 ms."""

    @classmethod
    def now(cls, watched_pid: int) -> CpuTimes:
        """Read the current times; takes milliseconds."""
        times = psutil.Process(watched_pid).cpu_times()
        foreign_ticks = _steal_ticks() + _ticks_of_others(frozenset((watched_pid, os.getpid())))
        return cls(time.monotonic(), times.user + times.system, foreign_ticks / _TICKS_PER_S)

    def __sub__(self, earlier: CpuTimes) -> CpuTimes:
        # The time of a process that ended without being waited for disappears.
        foreign_s = max(0.0, self.foreign_s - earlier.foreign_s)
        return CpuTimes(self.wall_s - earlier.wall_s, self.watched_s - earlier.watched_s, foreign_s)


def _steal_ticks() -> int:
    return int((_PROC / "stat").read_text(encoding="ascii").split()[8])


def _ticks_of_others(own_pids: frozenset[int]) -> int:
    """User and system time, with that of waited-for children; see proc_pid_stat(5), fields 14 to 17."""
    ticks = 0
    for path in _PROC.glob("[0-9]*/stat"):
        if int(path.parent.name) in own_pids:
            continue
        with contextlib.suppress(OSError):
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks
