"""Where ranks connect to each other."""

from __future__ import annotations

import socket

import pytest

from services.worker.parallel.rendezvous import Rendezvous, open_rendezvous
from shared.network.addresses import split_address


def test_each_start_has_an_id_and_a_listener_of_its_own() -> None:
    first, second = (open_rendezvous("127.0.0.1") for _ in range(2))
    assert first.start_id != second.start_id
    for rendezvous in (first, second):
        with socket.create_connection(split_address(rendezvous.store)):
            pass
        assert rendezvous.listener is not None
        rendezvous.listener.close()


@pytest.mark.parametrize(
    ("host", "store"), [("127.0.0.3", "127.0.0.3:"), ("localhost", "127.0.0.1:"), ("::1", "[::1]:")]
)
def test_others_are_told_an_ip_address_on_which_alone_it_listens(host: str, store: str) -> None:
    rendezvous = open_rendezvous(host)
    assert rendezvous.store.startswith(store)
    assert rendezvous.listener is not None
    assert rendezvous.listener.getsockname()[0] == split_address(rendezvous.store)[0]
    rendezvous.listener.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_an_address_that_this_machine_does_not_have_is_an_error(host: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - a name that does not resolve has another text on each system
        open_rendezvous(host)


def test_collectives_bind_the_address_of_the_route_unless_another_is_given() -> None:
    assert Rendezvous("start", "127.0.0.1:5000").local_host() == "127.0.0.1"
    assert Rendezvous("start", "127.0.0.1:5000", collective_host="127.0.0.3").local_host() == "127.0.0.3"
