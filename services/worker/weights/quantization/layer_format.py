"""How one layer is stored: the interface of formats, and the plain one. `CheckpointWeights` does the reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

# These need no scale; safetensors' names.
FLOAT_DTYPES = ("F32", "F16", "BF16")


class MalformedLayerError(ValueError):
    """A layer's tensors have the right shapes but contradictory contents."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a layer, as a format expects it."""

    role: str
    """Its key in `parts` of `LayerFormat.dequantize`."""
    suffixes: tuple[str, ...]
    """What may follow the layer's name; the first one stored is used."""
    shapes: tuple[tuple[int, ...], ...]
    """Allowed ones."""
    dtypes: tuple[str, ...]
    """Allowed ones, by safetensors' names."""
    is_optional: bool = False


class LayerFormat(Protocol):
    """A format of matrices [out_features, in_features], or of stacks of matrices [in_features, out_features].

    Activations are never quantised, even for a checkpoint made for that (W8A8), which loses only speed.
    """

    @property
    def label(self) -> str:
        """Name in log lines."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of tensors that the layer may have but does not need."""

    @property
    def is_transposed(self) -> bool:
        """Whether matrices are stored and dequantised transposed."""

    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """The tensors stored for a matrix or stack of this `shape` in the model."""

    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """A part of a stored matrix, [len(rows), len(columns)], in a float dtype; it may be a view of `parts`.

        Args:
            parts: Whole tensors by role; for a stack, one matrix's.
            rows: Rows of the stored matrix, step 1.
            columns: Columns of the stored matrix, step 1.

        Raises:
            MalformedLayerError: the tensors' contents contradict each other.
        """


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """A matrix or stack stored as one tensor in a float dtype."""

    suffix: str = ".weight"
    label: str = field(default="plain", init=False)
    unused: tuple[str, ...] = field(default=(), init=False)
    is_transposed: bool = field(default=False, init=False)

    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """See `LayerFormat`."""
        return (StoredTensor("weight", (self.suffix,), (shape,), FLOAT_DTYPES),)

    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """See `LayerFormat`."""
        return parts["weight"][rows.start : rows.stop, columns.start : columns.stop]
