"""Converts stored tensors into floating point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.weights.quantization.layer_format import LayerFormat

# Values dequantised at once, few enough for intermediate results to stay in the processor's caches.
_CHUNK_VALUES = 1 << 18


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a matrix, or of several in a stack."""

    matrices: range | None
    """None means a single matrix."""
    rows: range
    columns: range

    @property
    def num_matrices(self) -> int:
        """1 for a single matrix."""
        return 1 if self.matrices is None else len(self.matrices)

    @property
    def num_values(self) -> int:
        """Values in all matrices."""
        return self.num_matrices * len(self.rows) * len(self.columns)


def dequantize(layer_format: LayerFormat, parts: Mapping[str, Tensor], region: Region, out: Tensor) -> bool:
    """Write `region` into `out`. Returns False, with `out` partly written, if a value is not finite."""
    if region.matrices is None:
        return _dequantize_matrix(layer_format, parts, region, out)
    return all(
        _dequantize_matrix(layer_format, {role: part[matrix] for role, part in parts.items()}, region, target)
        for matrix, target in zip(region.matrices, out, strict=True)
    )


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Costs a tenth of hashing."""
    return not values.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(values))


def selected_run(part: slice, size: int) -> range:
    """The indices that `part`, with step 1, selects out of `size`."""
    start, stop, step = part.indices(size)
    assert step == 1, "only runs are read"
    return range(start, max(start, stop))


def _dequantize_matrix(layer_format: LayerFormat, parts: Mapping[str, Tensor], region: Region, out: Tensor) -> bool:
    rows, columns = region.rows, region.columns
    if layer_format.is_transposed:
        out, rows, columns = out.T, columns, rows
    num_rows = max(_CHUNK_VALUES // max(len(columns), 1), 1)
    for start in range(0, len(rows), num_rows):
        values = layer_format.dequantize(parts, rows[start : start + num_rows], columns).to(out.dtype)
        # Checked on the host, while they are in the processor's caches: `out` may be on a device.
        if not is_finite(values):
            return False
        out[start : start + num_rows].copy_(values)
    return True
