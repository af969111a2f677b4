"""What a management port answers, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from shared.network.addresses import split_address
from tests.support.system.patience import PATIENCE_S

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: str


async def get(address: str, path: str, *, method: str = "GET") -> Answer:
    """One request to `unix:PATH` or `HOST:PORT`."""
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: cell\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    status, *lines = head.split("\r\n")
    return Answer(int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body)


async def scrape(address: str | Path) -> list[Metric]:
    """The metrics, as the Prometheus library parses them; a path is that of a socket."""
    page = await get(f"unix:{address}" if isinstance(address, Path) else address, "/metrics")
    assert page.status == 200
    return list(text_string_to_metric_families(page.body))


async def probes(address: str) -> dict[str, str]:
    """Status and reason of each probe."""
    answers = {path: await get(address, f"/{path}") for path in ("livez", "startupz", "readyz")}
    return {path: f"{answer.status} {answer.body.strip()}" for path, answer in answers.items()}


async def wait_for_probes(address: str, expected: dict[str, str]) -> None:
    """Wait until a process listens and answers this."""
    answers: dict[str, str] = {}
    async with asyncio.timeout(PATIENCE_S):
        while answers != expected:
            with contextlib.suppress(OSError):
                answers = await probes(address)
            await asyncio.sleep(_POLL_S)


def values(families: Iterable[Metric]) -> dict[str, float]:
    """Our own samples by name, followed by the values of their labels."""
    samples = [sample for family in families if family.name.startswith("lockstep_") for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}
