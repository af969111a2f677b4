"""Finds workers by a name that has an address for each of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import Any

from services.scheduler.cell.events import Endpoint
from services.scheduler.discovery.last_seen import LastSeen, OnFound
from shared.network.addresses import join_address, split_address

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


class DnsDiscovery:
    """Looks a name up again and again.

    A look-up that fails or finds nothing changes nothing: DNS does not tell "none" from "unknown" reliably. So the last
    endpoint is only known to be gone by its broken stream.
    """

    def __init__(self, name: str, period_s: float, last_seen: LastSeen) -> None:
        """`name` is HOST:PORT."""
        self._host, self._port = split_address(name)
        self._period_s = period_s
        self._last_seen = last_seen
        self._problem = ""

    async def run(self, on_found: OnFound) -> None:
        """Report each new set of endpoints, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            endpoints = await self._look_up()
            if endpoints:
                self._last_seen.note(endpoints, loop.time(), on_found)
            await asyncio.sleep(self._period_s)

    async def _look_up(self) -> tuple[Endpoint, ...]:
        problem = ""
        addresses: set[str] = set()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            addresses = _addresses(found)
        except (OSError, TimeoutError) as error:
            problem = str(error) or "no answer"
        if problem != self._problem:
            logger.warning("the workers' name was looked up", extra={"host": self._host, "problem": problem or "none"})
            self._problem = problem
        return tuple(map(Endpoint, sorted(addresses)))


def _addresses(found: Iterable[tuple[int, int, int, str, tuple[Any, ...]]]) -> set[str]:
    """As HOST:PORT. A worker with addresses of both families would take two places, so one family is used."""
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, where in found:
        by_family.setdefault(family, set()).add(join_address(where[0], where[1]))
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or set()
