"""How model files read their weights; see `checkpoint` and `dummy_weights`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat

# The whole of a dimension.
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats in which matrices are returned."""

    kept: frozenset[MatrixFormat] = frozenset()
    """What is stored in one of these is not dequantised."""
    quantized: MatrixFormat | None = None
    """What is stored in a float dtype is quantised to this one; None means that it stays as it is."""
    has_orders: bool = True
    """Whether a packed matrix may have its columns in another order; otherwise it is dequantised."""

    @property
    def of_embedding(self) -> WeightFormats:
        """The formats in which an embedding is read: it stays as stored."""
        return replace(self, quantized=None)

    @property
    def of_head(self) -> WeightFormats:
        """The formats in which a head is read: if matrices are quantised, 8 bits."""
        return self if self.quantized is None else replace(self, quantized=MatrixFormat.INT8)

    @property
    def of_experts(self) -> WeightFormats:
        """The formats in which an expert's matrices are read: kernels take rows that all experts share."""
        return replace(self, has_orders=False)


DENSE = WeightFormats()


class ModelWeights(Protocol):
    """A model's weights, whatever format they are stored in.

    A problem with a tensor (missing, another shape or dtype, values that are not finite) does not stop a read: it is
    recorded, a tensor of the right shape with arbitrary values is returned, and `check_complete` raises one error that
    lists all problems. So a layer never sees a wrong shape, and must not judge values.

    The caller owns every tensor returned and may write to it. All are contiguous. Slices have a step of 1 and need not
    be aligned to a format's blocks or groups: a matrix whose groups they cut is dequantised. Only the selected part is
    read.
    """

    dtype: torch.dtype
    """The dtype that the model runs in, which is that of what is not packed."""
    device: torch.device
    """Where every tensor returned is."""
    packed_formats: set[MatrixFormat]
    """The formats of the packed matrices returned so far."""

    def __contains__(self, name: str) -> bool:
        """Whether such a tensor is stored; dummy weights store none."""

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor that no format packs: norms, biases.

        Args:
            name: The full name.
            shape: The whole tensor's.
            rows: The part of the first dimension to read.
            dtype: The result's; None means the model's.

        Raises:
            ModelDirectoryError: too much is missing to continue; as from `check_complete`.
        """

    def scale(self, names: Sequence[str]) -> Tensor:
        """Read the number that codes are multiplied by: the tensor of the first of `names` that is stored, or 1.

        What is not a normal positive number of float32 is a problem.

        Returns:
            [1] float32.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        """Read a linear layer's matrix, packed if its format is kept or if matrices are quantised.

        Args:
            name: Without `.weight`.
            shape: (out_features, in_features) of the whole matrix.
            rows: Output features to read.
            columns: Input features to read.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def expert(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        """Read a matrix of one of many experts as `linear` does; if it stays packed, its columns are in order."""

    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Read as `linear` does, but dequantised: what must be precise, or is not used in a product as it is."""

    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        """Read an embedding that is not the head too, as `linear` does, but never quantise it."""

    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        """Read the projection onto the vocabulary as `linear` does, but quantise it to 8 bits in any case.

        At 4 bits it would raise perplexity far more than all other layers together.
        """

    def stacked(
        self,
        name: str,
        shape: tuple[int, int, int],
        expert: int,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        in_any_order: bool = False,
    ) -> Matrix:
        """Read one expert of a stack, as in gpt-oss: tensor `name`, or `{name}_blocks` and `{name}_scales`.

        Args:
            name: Without a format's suffix.
            shape: (experts, in_features, out_features) of the whole stack.
            expert: Its number.
            rows: Output features to read.
            columns: Input features to read.
            in_any_order: Whether a stack of floats may also be [experts, out_features, in_features]. It is that if
                `shape` allows both, as in transformers.

        Returns:
            [out_features, in_features], as from `linear`, whatever the order in the stack.

        Raises:
            ModelDirectoryError: as in `read`.
        """

    def differ(self, name: str, other: str) -> bool:
        """Whether both tensors are stored, with values that differ in the model's dtype. Counts as a read of `name`."""

    def ignore(
        self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = (), patterns: Sequence[str] = ()
    ) -> None:
        """Allow tensors to stay unread; any other unread tensor is an error.

        Args:
            prefixes: How their names begin.
            suffixes: How their names end.
            patterns: Regular expressions that match anywhere in their names.
        """

    def check_complete(self) -> None:
        """End the load: check that every stored tensor was read or ignored, and all reads were correct.

        Raises:
            ModelDirectoryError: lists all problems.
        """
