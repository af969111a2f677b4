"""What a model asks its weights for: the contract between the model files and whatever holds the weights.

Behind it stand a checkpoint in any format (`checkpoint`) or seeded random values (`dummy_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# The whole of a dimension.
ALL = slice(None)


class ModelWeights(Protocol):
    """The weights of a model, in the dtype it runs in, whatever format they are kept in.

    What is wrong with them (a tensor missing, of another shape or dtype, with values that are not finite) does not end
    a read: it is noted, memory of the right shape with anything in it is returned, and `check_complete` raises one
    error that lists everything. So a layer never sees a wrong shape, and must not judge values.

    Every tensor returned is memory of its caller's own, to keep and to write, contiguous but for `stacked`. Slices have
    a step of 1 and may lie anywhere: none has to fall on the blocks or groups of a format. Only what they select is
    read.
    """

    # What the model runs in.
    dtype: torch.dtype

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of this name is stored; dummy weights store none."""

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """New memory in `dtype`, for several reads that write into it.

        Raises:
            ModelDirectoryError: it is more than all that is stored could fill.
        """

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that no format packs: embeddings, norms, biases, routers.

        Args:
            name: The tensor's, in full.
            shape: Of the whole tensor.
            rows: What to read of its first dimension.
            dtype: Instead of the model's.

        Raises:
            ModelDirectoryError: so much is missing that there is no point in going on; it lists what `check_complete`
                would.
        """

    def linear(
        self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None
    ) -> Tensor:
        """The matrix of a linear layer, in whatever format this layer is kept.

        Args:
            name: The layer's, without `.weight`.
            shape: (out_features, in_features) of the whole matrix.
            rows: Of the output features.
            columns: Of the input features.
            out: Where to write it instead of new memory; of the selected part's shape, any float dtype and strides.

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
        """The matrices of all experts, as gpt-oss keeps them: `name` itself, or `{name}_blocks` and `{name}_scales`.

        Args:
            name: The tensor's, without a format's suffix.
            shape: (experts, in_features, out_features) of the whole: `x @ result[e]` is expert e's product.
            experts: Which of them.
            rows: Of the input features.
            columns: Of the output features.

        Returns:
            A new tensor; where a format keeps the matrices transposed, a transposed view of one.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def ignore(self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = ()) -> None:
        """Tensors whose names start or end like this may be there unread; without it each is an error."""

    def check_complete(self) -> None:
        """End the load: every tensor that is stored was read or is ignored, and everything read was right.

        Raises:
            ModelDirectoryError: it lists all that is missing, misshapen, malformed or left over.
        """
