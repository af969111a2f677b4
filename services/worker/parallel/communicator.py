"""How ranks exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.layout import RankLayout


class Communicator(Protocol):
    """Collectives over some ranks, which must all make the same calls, in the same order, with matching shapes.

    Tensors are contiguous. Raises PartnerLostError when a partner is lost; the process then ends.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks of a floating-point x [..., n], bitwise equal on all of them; may overwrite `x`.

        With an exact ops backend an all-gather and a sum in rank order: a ring's order of summation depends on where in
        the buffer a row is.
        """

    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The ranks' x [T, sizes[rank]] side by side, in rank order: [T, sum(sizes)]; may be `x` on a single rank."""

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Exchange rows of x [sum(send_counts), ...], in order of the rank they go to.

        Returns:
            A new [sum(receive_counts), ...], in order of the rank they come from.
        """

    def gather_rows(self, x: Tensor) -> Tensor:
        """The ranks' x [T, ...] one after the other, in rank order: [size * T, ...]; may be `x` on a single rank."""

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """This rank's T rows of the sum over all ranks of a floating-point x [size * T, ...]; may be `x` on one rank.

        With an exact ops backend the sum is in rank order, as that of `all_reduce`.
        """


@dataclass(frozen=True, slots=True)
class Parallel:
    """What layers are sharded with."""

    layout: RankLayout
    tp: Communicator
    ep: Communicator | None = None
    """Spans all ranks of the cell; None without expert parallelism or other ranks."""


class SingleCommunicator(Communicator):
    """A rank without partners."""

    rank = 0
    size = 1

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    @override
    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return x

    @override
    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        return x.clone()

    @override
    def gather_rows(self, x: Tensor) -> Tensor:
        return x

    @override
    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        return x


# A model on one rank.
SINGLE = Parallel(RankLayout(), SingleCommunicator())


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """An exact `all_reduce`: a new tensor, summed in order in float32 or wider and rounded once."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)
