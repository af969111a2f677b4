"""Addresses as text: `unix:PATH`, or `HOST:PORT` where an IPv6 host is in brackets."""

from __future__ import annotations

import ipaddress
import re

# As in the host of a URL: without brackets.
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

_HOST_AND_PORT = re.compile(r"(?:\[(?P<ipv6>[^][]+)]|(?P<host>[^][:]+)):(?P<port>[0-9]{1,5})")
_LAST_PORT = 65535
_VALID = "HOST:PORT, with an IPv6 address in brackets"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, the host without brackets.

    Raises:
        ValueError: it is something else.
    """
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or int(found["port"]) > _LAST_PORT:
        raise ValueError(f"must be {_VALID}")
    return found["ipv6"] or found["host"], int(found["port"])


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`. The host is one without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> str:
    """Return `unix:PATH` or `HOST:PORT` unchanged.

    Raises:
        ValueError: it is neither.
    """
    if address == "unix:":
        raise ValueError("unix: needs a path after it")
    if not address.startswith("unix:"):
        try:
            split_address(address)
        except ValueError:
            raise ValueError(f"must be unix:PATH or {_VALID}") from None
    return address


def check_host_and_port(address: str) -> str:
    """Return `HOST:PORT` unchanged.

    Raises:
        ValueError: it is something else.
    """
    split_address(address)
    return address


def check_host(host: str) -> str:
    """Return a host's name or IP address unchanged, an IPv6 address in brackets.

    Raises:
        ValueError: it is neither.
    """
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host or "/" in host or (":" in host and not is_bracketed):
        raise ValueError("must be a host without a port; an IPv6 address is in brackets")
    return host


def strip_brackets(host: str) -> str:
    """A host that may be in brackets without them."""
    return host.removeprefix("[").removesuffix("]")


def is_local(address: str) -> bool:
    """Whether only this machine can reach a valid address."""
    return address.startswith("unix:") or split_address(address)[0] in LOOPBACK_HOSTS


def is_on_every_interface(address: str) -> bool:
    """Whether a server at a valid address listens on every interface."""
    return not address.startswith("unix:") and is_any_host(split_address(address)[0])


def is_any_host_of_both_families(host: str) -> bool:
    """Whether a host, without brackets, is `::`, which means every interface by IPv6 and by IPv4."""
    return ":" in host and is_any_host(host)


def is_any_host(host: str) -> bool:
    """Whether a host, without brackets, is the IP address that means every interface."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
