"""How one layer is stored: the interface of formats, and the plain one. `CheckpointWeights` does the reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat

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
    zero_byte: int = 0
    """What zero points consist of where they subtract nothing."""


class LayerFormat(Protocol):
    """A format of matrices [out_features, in_features], or of stacks of matrices.

    The shape of a stack is (experts, in_features, out_features), as in the models that have stacks.
    """

    @property
    def label(self) -> str:
        """Name in log lines."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of tensors that the layer may have but does not need."""

    @property
    def packed_as(self) -> MatrixFormat | None:
        """The format of what `packed` returns; None if that is always None."""

    def may_pack(self, columns: range) -> bool:  # noqa: ARG002
        """Whether `packed` may return a matrix for a part with these columns, by what is known before tensors are."""
        return self.packed_as is not None

    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """The tensors stored for a matrix or stack of this `shape` in the model."""

    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        """A part of a matrix, [len(rows), len(columns)], in a float dtype; it may be a view of `parts`.

        Args:
            parts: Whole tensors by role; for a stack, one matrix's.
            rows: Output features, step 1.
            columns: Input features, step 1.

        Raises:
            MalformedLayerError: the tensors' contents contradict each other.
        """

    def packed(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Matrix | None:
        """The same part without dequantising it, in new memory; None if it cannot be expressed like that.

        `dequantize` gives the same values, but for the rounding of offsets. They may be not finite: see
        `has_finite_values`.

        Args:
            parts: As for `dequantize`.
            rows: As for `dequantize`; not empty.
            columns: As for `dequantize`; not empty.

        Raises:
            MalformedLayerError: as `dequantize`.
        """


@dataclass(frozen=True, slots=True)
class PlainFormat(LayerFormat):
    """A matrix or stack stored as one tensor in a float dtype."""

    suffix: str = ".weight"
    is_transposed: bool = False
    """Whether matrices are stored as [in_features, out_features]."""
    label: str = field(default="plain", init=False)
    unused: tuple[str, ...] = field(default=(), init=False)
    packed_as: MatrixFormat | None = field(default=None, init=False)

    @override
    def stored_tensors(self, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        return (StoredTensor("weight", (self.suffix,), (shape,), FLOAT_DTYPES),)

    @override
    def dequantize(self, parts: Mapping[str, Tensor], rows: range, columns: range) -> Tensor:
        weight = parts["weight"].T if self.is_transposed else parts["weight"]
        return weight[rows.start : rows.stop, columns.start : columns.stop]

    @override
    def packed(
        self,
        parts: Mapping[str, Tensor],
        rows: range,
        columns: range,
    ) -> Matrix | None:
        return None
