"""How the ranks that serve one model exchange tensors, and what a rank alone does instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.worker.layout import RankLayout


class Communicator(Protocol):
    """Collectives over some ranks. Every one of them calls the same ones, in the same order, with fitting shapes.

    Tensors are contiguous. Raises RuntimeError where a partner is lost; the process ends then.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks of a floating x [..., n], on every rank the same bits; may be written into `x`.

        Where the ops backend is exact it is an all-gather and a sum in rank order: a ring's order of summation depends
        on where in the buffer a row stands.
        """

    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The ranks' x [T, sizes[rank]] side by side, in rank order: [T, sum(sizes)]; may be `x` where it is alone."""

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Exchange rows of x [sum(send_counts), ...]: the first go to rank 0, the next to rank 1, and so on.

        Returns:
            A new [sum(receive_counts), ...]: those from rank 0, then those from rank 1, and so on.
        """


@dataclass(frozen=True, slots=True)
class Parallel:
    """What layers are sharded by. `ep` is over all ranks of the cell; None without expert parallelism, or others."""

    layout: RankLayout
    tp: Communicator
    ep: Communicator | None = None


class SingleCommunicator:
    """Of one rank, which has nobody to exchange with. See `Communicator`."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        return x

    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        """See `Communicator`."""
        return x

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:  # noqa: ARG002
        """See `Communicator`."""
        return x.clone()


# A model on one rank.
SINGLE = Parallel(RankLayout(), SingleCommunicator())


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of floating tensors from the first to the last, new: what an exact `all_reduce` gives of the ranks'.

    It is taken in float32 at least, and rounded once.
    """
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)
