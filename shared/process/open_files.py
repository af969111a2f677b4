"""How many files a process may have open; each connection is one."""

from __future__ import annotations

import contextlib
import logging
import resource

logger = logging.getLogger(__name__)

OWN_FILES = 256
"""What a service opens beside its clients' connections: libraries, children, links, the management port's."""


def share_open_files(*promised: int) -> tuple[int, ...]:
    """Raise this process's limit to the highest that it may set itself, and fit the connections that it promises in.

    Container runtimes start processes with a limit of 1024 that these may raise.

    Args:
        promised: The most connections of each of its ports.

    Returns:
        As many for each port; fewer in proportion, and with a warning, if the limit is too low. `OWN_FILES` are left,
        or half of a very low limit, so that no number of connections keeps probes out.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        # The system's own limit may have been lowered since.
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    num_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = sum(promised)
    if num_open == resource.RLIM_INFINITY or num_open >= total + OWN_FILES:
        return promised
    room = max(num_open - OWN_FILES, num_open // 2)
    shares = tuple(number and max(1, number * room // total) for number in promised)
    logger.warning(
        "the limit of open files is too low for the connections that this service may have; fewer are accepted",
        extra={"open_files": num_open, "needed": total + OWN_FILES, "connections": sum(shares)},
    )
    return shares
