"""CPU time limits of trials in a separate process: on a busy machine it may wait for seconds."""

from __future__ import annotations

import signal

# Even a very busy machine has scheduled the process by then: the wall-clock limit only ends a trial that hangs.
_WALL_CLOCK_RATIO = 10.0
_MIN_WALL_CLOCK_S = 60.0


def wall_clock_s(cpu_s: float) -> float:
    """How long to wait for a trial that may use `cpu_s`."""
    return max(_MIN_WALL_CLOCK_S, _WALL_CLOCK_RATIO * cpu_s)


def limit_cpu(cpu_s: float) -> None:
    """Have the kernel kill this process with SIGPROF after `cpu_s` more; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def was_out_of_cpu(returncode: int) -> bool:
    """Whether `limit_cpu` killed the process."""
    return returncode == -signal.SIGPROF


def cpu_problem(cpu_s: float) -> str:
    """The message for a trial that `limit_cpu` killed."""
    return f"it takes more than {cpu_s:g} s of CPU time"
