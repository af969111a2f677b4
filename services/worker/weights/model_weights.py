"""How model files read their weights; see `checkpoint` and `dummy_weights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# The whole of a dimension.
ALL = slice(None)


class ModelWeights(Protocol):
    """A model's weights, in the dtype it runs in, whatever format they are stored in.

    A problem with a tensor (missing, another shape or dtype, values that are not finite) does not stop a read: it is
    recorded, a tensor of the right shape with arbitrary values is returned, and `check_complete` raises one error that
    lists all problems. So a layer never sees a wrong shape, and must not judge values.

    The caller owns every tensor returned and may write to it. All are contiguous except those from `stacked`. Slices
    have a step of 1 and need not be aligned to a format's blocks or groups. Only the selected part is read.
    """

    dtype: torch.dtype
    device: torch.device
    """Where every tensor returned is."""

    def __contains__(self, name: str) -> bool:
        """Whether such a tensor is stored; dummy weights store none."""

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """New memory in `dtype` that several reads write into.

        Raises:
            ModelDirectoryError: it is larger than all stored tensors together could fill.
        """

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor that no format packs: embeddings, norms, biases, routers.

        Args:
            name: The full name.
            shape: The whole tensor's.
            rows: The part of the first dimension to read.
            dtype: The result's; None means the model's.

        Raises:
            ModelDirectoryError: too much is missing to continue; as from `check_complete`.
        """

    def linear(
        self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None
    ) -> Tensor:
        """Read a linear layer's matrix, in whatever format it is stored.

        Args:
            name: Without `.weight`.
            shape: (out_features, in_features) of the whole matrix.
            rows: Output features to read.
            columns: Input features to read.
            out: Written and returned; has the selected part's shape, any float dtype and strides. None means new
                memory.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def stacked(
        self,
        name: str,
        shape: tuple[int, int, int],
        *,
        experts: slice = ALL,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> Tensor:
        """Read experts stored as one stack, as in gpt-oss: tensor `name`, or `{name}_blocks` and `{name}_scales`.

        Args:
            name: Without a format's suffix.
            shape: (experts, in_features, out_features) of the whole stack: `x @ result[e]` is expert e's product.
            rows: Input features to read.
            columns: Output features to read.

        Returns:
            A new tensor, or a transposed view of one if the format stores the matrices transposed.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def ignore(self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = ()) -> None:
        """Allow tensors with these prefixes or suffixes to stay unread; any other unread tensor is an error."""

    def check_complete(self) -> None:
        """End the load: check that every stored tensor was read or ignored, and all reads were correct.

        Raises:
            ModelDirectoryError: lists all problems.
        """
