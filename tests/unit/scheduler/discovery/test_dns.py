"""Workers found by a name."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from services.scheduler.cell.events import Endpoint
from services.scheduler.discovery.dns import DnsDiscovery
from services.scheduler.discovery.last_seen import LastSeen
from tests.support.system.patience import PATIENCE_S

FOUR, SIX = socket.AF_INET, socket.AF_INET6


def answer(*hosts: str) -> list[tuple[Any, ...]]:
    return [
        (SIX, socket.SOCK_STREAM, 6, "", (host, 7, 0, 0))
        if ":" in host
        else (FOUR, socket.SOCK_STREAM, 6, "", (host, 7))
        for host in hosts
    ]


async def look_up(monkeypatch: pytest.MonkeyPatch, *answers: list[tuple[Any, ...]] | OSError) -> list[Any]:
    """What is found when the resolver gives these answers in turn, and then only errors."""
    found: list[tuple[Endpoint, ...]] = []
    rest = list(answers)
    is_over = asyncio.Event()

    async def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[Any, ...]]:
        assert (host, port) == ("workers.example.org", 7)
        if not rest:
            is_over.set()
            raise socket.gaierror(socket.EAI_AGAIN, "again")
        if isinstance(one := rest.pop(0), OSError):
            raise one
        return one

    # The resolver is the system's: no test may depend on what it answers.
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    discovery = DnsDiscovery("workers.example.org:7", 0.0, LastSeen(0.0))
    task = asyncio.create_task(discovery.run(found.append))
    await asyncio.wait_for(is_over.wait(), PATIENCE_S)
    task.cancel()
    return [[endpoint.address for endpoint in endpoints] for endpoints in found]


async def test_each_address_is_an_endpoint_and_only_news_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    two = answer("10.0.0.2", "10.0.0.1", "10.0.0.1")
    found = await look_up(monkeypatch, two, answer("10.0.0.1", "10.0.0.2"), answer("10.0.0.2"))
    assert found == [["10.0.0.1:7", "10.0.0.2:7"], ["10.0.0.2:7"]]


async def test_a_failure_or_an_empty_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = socket.gaierror(socket.EAI_NONAME, "unknown")
    assert await look_up(monkeypatch, answer("10.0.0.1"), failure, answer(), answer("10.0.0.1")) == [["10.0.0.1:7"]]


async def test_a_worker_with_addresses_of_both_families_is_one_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await look_up(monkeypatch, answer("fd00::1"), answer("fd00::1", "10.0.0.1"))
    assert found == [["[fd00::1]:7"], ["10.0.0.1:7"]]


async def test_a_real_look_up_of_loopback() -> None:
    found: asyncio.Queue[tuple[Endpoint, ...]] = asyncio.Queue()
    task = asyncio.create_task(DnsDiscovery("127.0.0.1:7", 60.0, LastSeen(0.0)).run(found.put_nowait))
    assert await asyncio.wait_for(found.get(), PATIENCE_S) == (Endpoint("127.0.0.1:7"),)
    task.cancel()
