"""The services' flag --manage-listen: each worker of a cell needs an address of its own."""

from __future__ import annotations

from collections.abc import Sequence

from services.cli.processes.service_command import find_flag
from shared.network.addresses import join_address, split_address

_FLAG = "--manage-listen"


def find_manage_address(flags: Sequence[str]) -> str | None:
    """The address that a service's flags name, if any."""
    return find_flag(flags, _FLAG)


def number_manage_address(flags: Sequence[str], number: int, rank: str) -> list[str]:
    """The flags of one of several workers, with an address of its own if they name one.

    `number` counts the cell's workers from 0 and is added to the port; a socket's path is followed by a dot and `rank`.
    """
    address = find_manage_address(flags)
    if address is None:
        return list(flags)
    place = next(index for index, flag in enumerate(flags) if flag.partition("=")[0] == _FLAG)
    end = place + (1 if "=" in flags[place] else 2)
    return [*flags[:place], f"{_FLAG}={number_address(address, number, rank)}", *flags[end:]]


def number_address(address: str, number: int, rank: str) -> str:
    """The address of one of several processes, as in `number_manage_address`.

    What is no address stays as it is, for the worker to refuse; so does port 0, the choice of a free one.
    """
    if address.startswith("unix:"):
        return f"{address}.{rank}"
    try:
        host, port = split_address(address)
    except ValueError:
        return address
    return join_address(host, port + number) if port else address
