"""Converts stored tensors into floating point, and checks that values are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.ops.matrices import BlockMatrix, Fp8Matrix, IntMatrix, JoinedMatrix, Matrix, Mxfp4Matrix
from services.worker.weights.quantization.layer_format import LayerFormat

# Values converted at once, few enough for intermediate results to stay in the processor's caches.
_CHUNK_VALUES = 1 << 18
# No code of an integer format is larger.
_LARGEST_CODE = 128
# Products of larger exponents with the largest value, 6, overflow float32; the one above both is NaN.
_LARGEST_SAFE_EXPONENT, _NAN_EXPONENT = 252, 255
# E4M3's largest number, and the bits of NaN besides the sign.
_LARGEST_E4M3, _E4M3_NAN = 448.0, 0x7F


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a matrix."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.rows), len(self.columns)

    @property
    def num_values(self) -> int:
        """All values."""
        return len(self.rows) * len(self.columns)

    def row_blocks(self) -> list[range]:
        """Runs of rows that are converted at once."""
        num_rows = max(_CHUNK_VALUES // max(len(self.columns), 1), 1)
        return [self.rows[start : start + num_rows] for start in range(0, len(self.rows), num_rows)]


def dequantize(layer_format: LayerFormat, parts: Mapping[str, Tensor], region: Region, out: Tensor) -> bool:
    """Write `region` into `out`. Returns False, with `out` partly written, if a value is not finite."""
    start = 0
    for rows in region.row_blocks():
        values = layer_format.dequantize(parts, rows, region.columns).to(out.dtype)
        # Checked on the host, while they are in the processor's caches: `out` may be on a device.
        if not is_finite(values):
            return False
        out[start : start + len(rows)].copy_(values)
        start += len(rows)
    return True


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Costs a tenth of hashing."""
    return not values.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(values))


def has_finite_values(matrix: Matrix) -> bool:
    """Whether all values are finite, from the scales of a packed matrix: also False if these nearly overflow."""
    if isinstance(matrix, IntMatrix):
        largest = matrix.scales.abs().mul_(_LARGEST_CODE)
        return is_finite(largest if matrix.offsets is None else largest.add_(matrix.offsets.abs()))
    if isinstance(matrix, Fp8Matrix):
        has_nan = matrix.codes.numel() > 0 and int((matrix.codes & _E4M3_NAN).max()) == _E4M3_NAN
        return not has_nan and is_finite(matrix.scales.abs().mul_(_LARGEST_E4M3))
    if isinstance(matrix, Mxfp4Matrix):
        largest_exponent = int(matrix.exponents.max()) if matrix.exponents.numel() else 0
        is_safe = largest_exponent <= _LARGEST_SAFE_EXPONENT
        return is_safe or (largest_exponent != _NAN_EXPONENT and is_finite(matrix.to_dense(torch.float32)))
    if isinstance(matrix, BlockMatrix):
        # Factors and codes are too small to make float16 overflow.
        places = matrix.block_type.float16_at
        halves = [matrix.blocks[..., at : at + 2].contiguous().view(torch.float16) for at in places]
        return all(map(is_finite, halves))
    if isinstance(matrix, JoinedMatrix):
        return all(map(has_finite_values, matrix.parts))
    return is_finite(matrix)


def selected_run(part: slice, size: int) -> range:
    """The indices that `part`, with step 1, selects out of `size`."""
    start, stop, step = part.indices(size)
    assert step == 1, "only runs are read"
    return range(start, max(start, stop))
