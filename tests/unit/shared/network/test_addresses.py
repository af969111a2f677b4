"""Addresses as text."""

from __future__ import annotations

import pytest

from shared.network.addresses import (
    check_address,
    check_host,
    check_host_and_port,
    is_any_host,
    is_local,
    is_on_every_interface,
    join_address,
    split_address,
    strip_brackets,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("node-0.example:0", "node-0.example", 0),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str, port: int) -> None:
    assert check_address(address) == check_host_and_port(address) == address
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        ":1",
        "localhost:",
        "localhost:65536",
        "localhost:x",
        "h:\u0661",
        "h:1:2",
        "h]:1",
        "[]:1",
        "[h:1",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    for check in (check_address, check_host_and_port, split_address):
        with pytest.raises(ValueError, match="HOST:PORT"):
            check(address)


@pytest.mark.parametrize("address", ["::1:7", ":::7", "fd00::1:7"])
def test_an_ipv6_address_without_brackets_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="an IPv6 address in brackets"):
        check_address(address)


def test_a_unix_socket_is_an_address_where_it_may_be() -> None:
    assert check_address("unix:/run/x.sock") == "unix:/run/x.sock"
    with pytest.raises(ValueError, match="unix: needs a path"):
        check_address("unix:")
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        check_host_and_port("unix:/run/x.sock")


@pytest.mark.parametrize(("host", "stripped"), [("a.example", "a.example"), ("10.0.0.1", "10.0.0.1"), ("[::1]", "::1")])
def test_a_host_alone_may_have_brackets(host: str, stripped: str) -> None:
    assert check_host(host) == host
    assert strip_brackets(host) == stripped


@pytest.mark.parametrize("host", ["", "a:1", "a/b", "::1", "[::1]:1"])
def test_a_host_alone_has_no_port(host: str) -> None:
    with pytest.raises(ValueError, match="must be a host without a port"):
        check_host(host)


@pytest.mark.parametrize("address", ["unix:/run/x.sock", "127.0.0.1:50051", "localhost:0", "[::1]:1"])
def test_a_unix_socket_and_loopback_are_local(address: str) -> None:
    assert is_local(address)
    assert not is_on_every_interface(address)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "example.org:1", "127.0.0.2.example.org:1", "[fd00::1]:1"])
def test_other_hosts_are_neither_local_nor_every_interface(address: str) -> None:
    assert not is_local(address)
    assert not is_on_every_interface(address)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"])
def test_every_interface_has_an_address_in_both_families(host: str) -> None:
    assert is_any_host(host)
    assert is_on_every_interface(join_address(host, 7))
    assert not is_local(join_address(host, 7))
