"""How many cores this process may use."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def num_usable_cores(cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """The cores that the process may run on, or fewer if a container's limit grants less time than they have.

    More threads than that are throttled: all of them stop until the limit's next period. A fraction of a core counts
    as a whole one.

    Args:
        cgroups: Where control groups are mounted.
        own_cgroups: The file that names this process's groups.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    num_cores = len(os.sched_getaffinity(0))
    return min([num_cores, *(math.ceil(quota) for quota in _quotas(cgroups, own_cgroups))])


def _quotas(cgroups: Path, own_cgroups: Path) -> Iterator[float]:
    """The limits of the process's group and of those around it, in cores."""
    own = next((line[len("0::/") :] for line in _lines(own_cgroups) if line.startswith("0::/")), "")
    for folder in (cgroups / own, *(cgroups / own).parents):
        if folder.is_relative_to(cgroups):
            yield from _quota(" ".join(_lines(folder / "cpu.max")))
    # Version 1: a container sees its own group here.
    files = (cgroups / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    yield from _quota(" ".join(line for file in files for line in _lines(file)))


def _quota(text: str) -> Iterator[float]:
    """`text` is "QUOTA PERIOD" in microseconds; the quota is max, or -1 in version 1, without a limit."""
    quota, _, period = text.partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        yield int(quota) / int(period)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
