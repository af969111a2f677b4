"""What the processes of a cell open to the network."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.system.patience import PATIENCE_S


def is_loopback(host: str) -> bool:
    """Whether a socket's end is on loopback, written as IPv4, IPv6, or IPv4 in IPv6."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def find_inet_addresses(cell: Cell) -> Iterator[tuple[str, str]]:
    """The process and the address of each end of its sockets, from /proc/net."""
    launcher = psutil.Process(cell.launcher.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        for connection in process.net_connections(kind="inet"):
            for end in (connection.laddr, connection.raddr):
                if end:
                    yield process.name(), end.ip


async def test_without_tls_every_socket_of_a_group_is_loopback_or_unix_and_a_killed_launcher_leaves_none(
    tiny_model: Path,
) -> None:
    request = token_request([1, 2, 3], max_tokens=4)
    # One of the services has child processes: one compiles grammars, another forks those that render chats.
    request.structured_output.regex = "[ab]+"
    with start_cell(tiny_model, "--tp=2", REFERENCE) as cell:
        async with connect(cell) as client:
            await client.generate(request)
            addresses = list(find_inet_addresses(cell))
        processes = psutil.Process(cell.launcher.pid).children(recursive=True)
        assert len(processes) >= len(cell.role_to_process) + 2
        # The tokenizer's port, the rendezvous and the collectives.
        assert len(addresses) > len(cell.role_to_process)
        assert [entry for entry in addresses if not is_loopback(entry[1])] == []

        cell.launcher.kill()
        assert cell.launcher.wait(PATIENCE_S) == -signal.SIGKILL
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert alive == []


def test_a_socket_on_every_interface_is_noticed() -> None:
    with socket.create_server(("", 0)):
        connections = psutil.Process().net_connections(kind="inet")
    assert any(not is_loopback(connection.laddr.ip) for connection in connections)
