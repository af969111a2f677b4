"""Communicators over `torch.distributed`: how ranks find each other, and what they say.

Process groups are made directly, with their store, and belong to whoever holds them: there is no default group, and no
collective of Python objects, which would be pickled.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from services.worker.layout import RankLayout
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel, sum_in_order

# Whoever is lost is noticed by others (DESIGN §7), and a step may be long: nobody gives up on a partner here.
COLLECTIVE_TIMEOUT = timedelta(days=1)
# Sums of at most so many bytes are gathered over Gloo: a ring takes more rounds, which a small sum waits for. Measured
# over loopback, two and three ranks: half the time for a few KiB where cores are free, no clear difference where they
# are busy; at 2 MiB it is the ring that wins, by up to three times.
_GATHERED_BYTES = 1 << 16

# ProcessGroupGloo or ProcessGroupNCCL: torch's stubs leave their collectives out.
_Group = Any


class GroupCommunicator:
    """See `Communicator`: over one process group."""

    def __init__(self, group: _Group, *, max_gathered_bytes: int) -> None:
        """Use `group`; tensors up to `max_gathered_bytes` are summed from what all ranks have, in rank order."""
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._max_gathered_bytes = max_gathered_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        if x.nbytes <= self._max_gathered_bytes:
            return sum_in_order(self._gather(x))
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """See `Communicator`."""
        # The library's parts are all of one size.
        parts = self._gather(F.pad(x, (0, max(sizes) - x.shape[1])))
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """See `Communicator`."""
        received = x.new_empty((sum(receive_counts), *x.shape[1:]))
        self._group.alltoall_base(received, x, receive_counts, send_counts).wait()
        return received

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a failure domain meet."""

    # HOST:PORT, where the domain's first rank serves a store.
    address: str
    # Of this start of the domain: ranks of another one are never met.
    start_id: str
    # The address of this machine that collectives bind; None: that of the route to `address`.
    collective_host: str | None = None
    # How long ranks wait for each other, here and in a collective.
    timeout: timedelta = COLLECTIVE_TIMEOUT

    def local_host(self) -> str:
        """The address that collectives bind. Nothing is sent to find out."""
        if self.collective_host is not None:
            return self.collective_host
        host, port = _host_and_port(self.address)
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])


def make_parallel(
    layout: RankLayout, rendezvous: Rendezvous | None = None, *, is_exact: bool, device: str = "cpu"
) -> Parallel:
    """Meet the other ranks of the failure domain, and connect to them.

    Args:
        layout: The place of this rank.
        rendezvous: Where the domain meets, which its first rank serves from here on; None for a rank that is alone.
        is_exact: Whether sums must have one order; see `Communicator.all_reduce`.
        device: What tensors are on: over "cpu" Gloo exchanges them, over "cuda" NCCL or RCCL.

    Raises:
        RuntimeError: the store's address is taken, or ranks did not come in time, or one was lost meanwhile.
    """
    if layout.is_alone:
        return Parallel(layout, SINGLE.tp)
    rank = layout.ep_rank if layout.is_coupled else layout.tp_rank
    assert rendezvous is not None, "ranks that do not know where to meet"
    host, port = _host_and_port(rendezvous.address)
    server = TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=rendezvous.timeout)
    store = PrefixStore(rendezvous.start_id, server)
    make_group = _make_nccl_group if device == "cuda" else _make_gloo_group
    gathered = sys.maxsize if is_exact else 0 if device == "cuda" else _GATHERED_BYTES

    def connect(name: str, group_rank: int, group_size: int) -> Communicator:
        if group_size == 1:
            return SINGLE.tp
        group = make_group(PrefixStore(name, store), group_rank, group_size, rendezvous)
        return GroupCommunicator(group, max_gathered_bytes=gathered)

    tp = connect(f"tp-{layout.dp_rank}", layout.tp_rank, layout.tp_size)
    if not layout.has_expert_parallel:
        return Parallel(layout, tp)
    return Parallel(layout, tp, connect("ep", rank, layout.ep_size) if layout.is_coupled else tp)


def _make_gloo_group(store: Store, rank: int, size: int, rendezvous: Rendezvous) -> _Group:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.local_host())]
    options._timeout = rendezvous.timeout
    # One collective at a time is under way.
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)


def _make_nccl_group(store: Store, rank: int, size: int, rendezvous: Rendezvous) -> _Group:
    # Not at the top: builds for the CPU have none.
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415

    options = ProcessGroupNCCL.Options()
    options._timeout = rendezvous.timeout
    return ProcessGroupNCCL(store, rank, size, options)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
