"""Collectives without partners, for devices without values."""

from __future__ import annotations

from torch import Tensor


class ShapeCommunicator:
    """Returns tensors of the right shapes, and keeps those of the rows that it was given. See `Communicator`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.shapes: list[tuple[int, ...]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        return x

    def all_gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """See `Communicator`."""
        return x.new_empty(len(x), sum(sizes))

    def all_to_all(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """See `Communicator`."""
        assert sum(send_counts) == len(x)
        return x.new_empty(sum(receive_counts), *x.shape[1:])

    def gather_rows(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        self.shapes.append(tuple(x.shape))
        return x.new_empty(self.size * len(x), *x.shape[1:])

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        self.shapes.append(tuple(x.shape))
        return x.new_empty(len(x) // self.size, *x.shape[1:])
