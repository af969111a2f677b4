"""Where the ranks of a failure domain connect to each other. Must not import torch: they meet before it is loaded."""

from __future__ import annotations

import contextlib
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta

from shared.network.addresses import join_address, split_address

# Effectively none: a step may take long, and the links between processes detect lost partners.
COLLECTIVE_TIMEOUT = timedelta(days=1)


class PartnerLostError(RuntimeError):
    """Another rank is gone, or does not answer: this rank's exchange with it cannot be completed."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What the ranks of one start of a failure domain know before they connect to each other."""

    start_id: str
    """Ranks of another start of the domain are never met."""
    store: str
    """HOST:PORT of the store that the domain's first rank serves."""
    listener: socket.socket | None = None
    """The store's socket, in the process of the first rank."""
    collective_host: str | None = None
    """Local address for collectives; None means the one on the route to `store`."""
    timeout: timedelta = COLLECTIVE_TIMEOUT
    """How long ranks wait for each other, here and in a collective."""

    def local_host(self) -> str:
        """The local address for collectives. Finding it sends nothing."""
        if self.collective_host is not None:
            return self.collective_host
        host, port = split_address(self.store)
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])


def open_rendezvous(host: str, port: int = 0) -> Rendezvous:
    """Begin a new start of a failure domain, whose store listens on this address alone; port 0 chooses a free one.

    Without a socket of its own the store would listen on every interface.

    Raises:
        OSError: the name does not resolve, or the address is taken or not one of this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as on_error:
        listener = on_error.enter_context(socket.socket(family, kind, protocol))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        on_error.pop_all()
    bound_host, bound_port = listener.getsockname()[:2]
    return Rendezvous(uuid.uuid4().hex, join_address(bound_host, bound_port), listener)
