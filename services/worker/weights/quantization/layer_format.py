"""How a checkpoint keeps the matrix of one layer, and the format of those that keep it as it is.

A format is pure description: which tensors a layer has, in which shapes and dtypes, and what a part of its matrix is
in floating point. Finding, checking and copying is `CheckpointWeights`' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

# safetensors' names of the dtypes that need no scale.
FLOAT_DTYPES = ("F32", "F16", "BF16")


class MalformedLayerError(ValueError):
    """A layer's tensors have the right shapes and contents that make no matrix; the message says what."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a layer."""

    # What `LayerFormat.dequantize` calls it.
    role: str
    # What stands behind the layer's name; the first that is stored counts.
    suffixes: tuple[str, ...]
    # Any of these.
    shapes: tuple[tuple[int, ...], ...]
    # Any of these, by safetensors' names.
    dtypes: tuple[str, ...]
    is_optional: bool = False


class LayerFormat(Protocol):
    """A format of matrices [out_features, in_features], or of stacks of matrices [in_features, out_features].

    Activations are never quantised here, also where a checkpoint was made for that (W8A8): its weights are used with
    activations as they are, which loses nothing but the speed of such kernels.
    """

    @property
    def label(self) -> str:
        """The format's name in log lines."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of tensors that such a layer may have and nobody here needs."""

    @property
    def is_transposed(self) -> bool:
        """Whether matrices are stored, and dequantised, with rows and columns exchanged."""

    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """What is stored for a matrix or stack of this `shape`, as the model has it."""

    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """A part of a stored matrix, [len(rows), len(columns)], in a float dtype; it may be a view of `parts`.

        Args:
            parts: The tensors by role, whole; of a stack, those of one matrix, without the first dimension.
            rows: Of the stored matrix, step 1.
            columns: Likewise.

        Raises:
            MalformedLayerError: contents contradict each other.
        """


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """A matrix, or a stack of them, in a float dtype under a name of its own."""

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
