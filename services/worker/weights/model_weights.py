"""`ModelWeights`: the interface through which model files read their weights.

It is implemented by `checkpoint`, for checkpoints in any format, and `dummy_weights`, for seeded random values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# The whole of a dimension.
ALL = slice(None)


class ModelWeights(Protocol):
    """The weights of a model, in the dtype it runs in, whatever format they are stored in.

    A problem with a tensor (it is missing, has another shape or dtype, or values that are not finite) does not stop a
    read: the problem is recorded, uninitialised memory of the right shape is returned, and `check_complete` raises one
    error that lists all problems. So a layer never sees a wrong shape, and must not judge values.

    The caller owns every tensor returned and may write to it. Tensors are contiguous, except those from `stacked`.
    Slices have a step of 1 and need not be aligned to the blocks or groups of a format. Only the selected part is
    read.
    """

    dtype: torch.dtype
    """The dtype that the model runs in."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of this name is stored; dummy weights store none."""

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """New memory in `dtype` that several reads write into.

        Raises:
            ModelDirectoryError: it is larger than all stored tensors together could fill.
        """

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor that no format packs: embeddings, norms, biases, routers.

        Args:
            name: The tensor's full name.
            shape: The shape of the whole tensor.
            rows: The part of the first dimension to read.
            dtype: The result's dtype; None means the model's.

        Raises:
            ModelDirectoryError: so much is missing that it is pointless to continue. The error lists the problems as
                `check_complete` does.
        """

    def linear(
        self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None
    ) -> Tensor:
        """Read the matrix of a linear layer, in whatever format the layer is stored.

        Args:
            name: The layer's name, without `.weight`.
            shape: (out_features, in_features) of the whole matrix.
            rows: The output features to read.
            columns: The input features to read.
            out: The tensor to write to, of the selected part's shape, any float dtype and strides; None for new memory.

        Returns:
            `out` or a new tensor.

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
            name: The tensor's name, without a format's suffix.
            shape: (experts, in_features, out_features) of the whole stack: `x @ result[e]` is expert e's product.
            experts: The experts to read.
            rows: The input features to read.
            columns: The output features to read.

        Returns:
            A new tensor. If the format stores the matrices transposed, it is a transposed view of a new tensor.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def ignore(self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = ()) -> None:
        """Allow tensors whose names start or end like this to stay unread. Any other unread tensor is an error."""

    def check_complete(self) -> None:
        """End the load: check that every stored tensor was read or ignored, and that all tensors read were correct.

        Raises:
            ModelDirectoryError: it lists every tensor that is missing, malformed, unexpected or of a wrong shape.
        """
