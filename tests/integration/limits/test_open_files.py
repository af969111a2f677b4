"""Services whose limit of open files is low: idle connections keep out neither probes nor clients for good."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

from shared.network.rpc import make_channel
from tests.support.system.polling import poll_until
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_environment, program_command

SOFT, HARD = 200, 700
NUM_IDLE = 1000


@dataclass(frozen=True)
class Limited:
    """A running service.

    Attributes:
        addresses: Its ports for clients.
    """

    process: subprocess.Popen[bytes]
    addresses: tuple[str, ...]
    manage_address: str
    log: Path

    def probe(self, path: str) -> int:
        """The status of a probe, as a kubelet asks for it."""
        connection = HTTPConnection(self.manage_address, timeout=60.0)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status


@contextmanager
def start_limited(role: str, folder: Path, *flags: str, ports: tuple[str, ...]) -> Iterator[Limited]:
    """Start a service with low limits, and wait until it has started."""
    addresses = {port: f"127.0.0.1:{free_port()}" for port in (*ports, "manage-listen")}
    arguments = [sys.executable, "-m", f"services.{role}", *flags]
    arguments += [f"--{port}={address}" for port, address in addresses.items()]
    # Of the shell's: it becomes the service.
    limits = f"ulimit -Sn {SOFT} && ulimit -Hn {HARD} && "
    command = program_command("/bin/sh", "-c", limits + 'exec "$@"', "sh", *arguments)
    log = folder / f"{role}.log"
    with log.open("wb") as stderr, subprocess.Popen(command, cwd=ROOT, env=module_environment(), stderr=stderr) as own:
        service = Limited(own, tuple(addresses[port] for port in ports), addresses["manage-listen"], log)
        try:
            yield service
        finally:
            own.kill()


@pytest.fixture(params=["tokenizer", "scheduler"])
def limited(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[Limited]:
    """Each role that has clients."""
    if request.param == "tokenizer":
        flags, port = [f"--model-dir={tiny_model}", f"--scheduler=unix:{tmp_path}/none"], "http-listen"
    else:
        flags, port = [f"--workers=unix:{tmp_path}/none"], "cell-listen"
    with start_limited(request.param, tmp_path, *flags, ports=("listen", port)) as service:
        yield service


async def test_idle_connections_keep_no_probe_out(limited: Limited) -> None:
    await poll_until(lambda: is_started(limited), lambda started: started)
    assert psutil.Process(limited.process.pid).rlimit(resource.RLIMIT_NOFILE) == (HARD, HARD)
    assert "the limit of open files is too low" in limited.log.read_text(encoding="utf-8")
    for address in limited.addresses:
        host, port = address.split(":")
        with ExitStack() as stack:
            for _ in range(NUM_IDLE):
                stack.enter_context(socket.create_connection((host, int(port))))
            assert limited.probe("/livez") == 200
            assert psutil.Process(limited.process.pid).num_fds() < HARD
    # They have left, and clients come in again.
    async with make_channel(limited.addresses[0]) as channel:
        await channel.channel_ready()
    assert limited.probe("/livez") == 200


async def is_started(limited: Limited) -> bool:
    try:
        return limited.probe("/startupz") == 200
    except OSError:
        return False
