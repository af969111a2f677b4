"""Communicators over `torch.distributed`.

Process groups are created directly, each with its store: no default group, and no collectives of pickled objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from services.worker.layout import RankLayout
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel, sum_in_order
from services.worker.parallel.rendezvous import PartnerLostError, Rendezvous
from shared.network.addresses import split_address

# Over Gloo, sums of at most this many bytes are gathered and added locally: a ring takes more rounds, and a small sum
# spends its time waiting for them. Over loopback with two and three ranks: half the time for a few KiB if cores are
# free, no clear difference if they are busy; at 2 MiB the ring wins, by up to three times.
_GATHERED_BYTES = 1 << 16

# ProcessGroupGloo or ProcessGroupNCCL: torch's stubs omit their collectives.
_Group = Any


class GroupCommunicator(Communicator):
    """A `Communicator` over one process group."""

    def __init__(self, group: _Group, *, max_gathered_bytes: int) -> None:
        """Tensors up to `max_gathered_bytes` are all-gathered and summed in rank order."""
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._is_gloo = isinstance(group, ProcessGroupGloo)
        self._max_gathered_bytes = max_gathered_bytes

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes <= self._max_gathered_bytes:
            return sum_in_order(self._gather(x))
        self._wait(self._group.allreduce([x]))
        return x

    @override
    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        # The library gathers parts of one size only.
        parts = self._gather(F.pad(x, (0, max(sizes) - x.shape[1])))
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    @override
    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        received = x.new_empty((sum(receive_counts), *x.shape[1:]))
        self._wait(self._group.alltoall_base(received, x, receive_counts, send_counts))
        return received

    @override
    def gather_rows(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size * len(x), *x.shape[1:]))
        self._wait(self._group._allgather_base(gathered, x))
        return gathered

    @override
    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        counts = [len(x) // self.size] * self.size
        if x.nbytes <= self._max_gathered_bytes:
            return sum_in_order(torch.split(self.all_to_all(x, counts, counts), counts))
        summed = x.new_empty((counts[0], *x.shape[1:]))
        self._wait(self._group._reduce_scatter_base(summed, x))
        return summed

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [x]))
        return parts

    def _wait(self, collective: Any) -> None:
        """Wait for a collective, on a GPU only until it is enqueued: the links between processes notice a loss then."""
        if self._is_gloo:
            with _partners():
                collective.wait()
        else:
            collective.wait()


@contextmanager
def _partners() -> Iterator[None]:
    """Where nothing but the loss of a partner fails: Gloo ends the process where ranks do not do the same."""
    try:
        yield
    except RuntimeError as error:
        raise PartnerLostError(f"a partner is lost: {error}") from error


def make_parallel(
    layout: RankLayout, rendezvous: Rendezvous | None = None, *, is_exact: bool, device: str = "cpu"
) -> Parallel:
    """Meet and connect to the other ranks of the failure domain.

    Args:
        rendezvous: Its store is served from here on by the domain's first rank, which takes over its listener; None for
            a rank that is alone.
        is_exact: Whether sums must have a fixed order; see `Communicator.all_reduce`.
        device: "cpu" uses Gloo, "cuda" uses NCCL or RCCL.

    Raises:
        PartnerLostError: ranks did not arrive in time, or one was lost meanwhile.
    """
    if layout.is_alone:
        return Parallel(layout, SINGLE.tp)
    rank = layout.ep_rank if layout.is_coupled else layout.tp_rank
    assert rendezvous is not None, "several ranks need a rendezvous"
    host, port = split_address(rendezvous.store)
    listener = _take_listener(rendezvous) if rank == 0 else None
    with _partners():
        server = TCPStore(
            host,
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=rendezvous.timeout,
            master_listen_fd=listener,
        )
    store = PrefixStore(rendezvous.start_id, server)
    make_group = _make_nccl_group if device == "cuda" else _make_gloo_group
    gathered = sys.maxsize if is_exact else 0 if device == "cuda" else _GATHERED_BYTES

    def connect(name: str, group_rank: int, group_size: int) -> Communicator:
        if group_size == 1:
            return SINGLE.tp
        group = make_group(PrefixStore(name, store), group_rank, group_size, rendezvous)
        communicator = GroupCommunicator(group, max_gathered_bytes=gathered)
        # NCCL connects with the first collective, which must not be one that a graph captures.
        communicator.all_reduce(torch.zeros(1, 1, device=device))
        return communicator

    tp = connect(f"tp-{layout.dp_rank}", layout.tp_rank, layout.tp_size)
    if not layout.has_expert_parallel:
        return Parallel(layout, tp)
    return Parallel(layout, tp, connect("ep", rank, layout.ep_size) if layout.is_coupled else tp)


def _take_listener(rendezvous: Rendezvous) -> int:
    assert rendezvous.listener is not None, "the first rank has the store's listener"
    return rendezvous.listener.detach()


def _make_gloo_group(store: Store, rank: int, size: int, rendezvous: Rendezvous) -> _Group:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.local_host())]
    options._timeout = rendezvous.timeout
    # Only one collective runs at a time.
    options._threads = 1
    with _partners():
        return ProcessGroupGloo(store, rank, size, options)


def _make_nccl_group(store: Store, rank: int, size: int, rendezvous: Rendezvous) -> _Group:
    # Not at the top: CPU builds of torch do not have it.
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415

    options = ProcessGroupNCCL.Options()
    options._timeout = rendezvous.timeout
    return ProcessGroupNCCL(store, rank, size, options)
