"""How long a trial in a process of its own may take: by the processor time that it uses, not by the clock on the wall.

On a busy machine a process may wait for seconds without having computed anything.
"""

from __future__ import annotations

import signal

# By then even a very busy machine has given a process its time: the wall clock only ends what waits for nothing.
_WALL_CLOCK_RATIO = 10.0
_MIN_WALL_CLOCK_S = 60.0


def wall_clock_s(cpu_s: float) -> float:
    """How long to wait for a trial that may use `cpu_s` of a processor."""
    return max(_MIN_WALL_CLOCK_S, _WALL_CLOCK_RATIO * cpu_s)


def limit_cpu(cpu_s: float) -> None:
    """Have the kernel end this process, by SIGPROF, once it has used so much of a processor from now on; 0 is never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def was_out_of_cpu(returncode: int) -> bool:
    """Whether a process that ended so had used what `limit_cpu` allows."""
    return returncode == -signal.SIGPROF


def cpu_problem(cpu_s: float) -> str:
    """Why a trial was ended that used more."""
    return f"it takes more than {cpu_s:g} s of a processor"
