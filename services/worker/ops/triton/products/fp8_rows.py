"""Rows quantised to FP8 (E4M3) for products with FP8 matrices, and how a GPU's matrix instructions read such numbers.

A group of a row's columns has a scale, the largest magnitude divided by the format's largest number, so that numbers
that round up saturate. Groups are 128 columns where the matrix has scales by group, else whole rows: a row's numbers
depend on nothing but the row.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.device import DeviceError, gpu_architecture
from services.worker.ops.matrices import Fp8Matrix

GROUP_SIZE = 128
"""Columns that share a scale in a row, if the matrix has scales by group."""

# A program quantises this many numbers at a time.
_NUMBERS = 1024
_NUM_WARPS = 4
# A group of smaller numbers counts as zeros. Its scale is not subnormal, which not every GPU has.
_SMALLEST_MAGNITUDE = tl.constexpr(2.0**-100)

_FIRST_NVIDIA_CAPABILITY = (8, 9)
_NEGATIVE_ZERO = 0x80
_CONVERTED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Fp8Encoding:
    """What the bits of an E4M3 number mean to matrix instructions."""

    dtype: torch.dtype
    largest: float
    weight_factor: float
    """The number of an `Fp8Matrix`'s code, divided by the number that the same bits have here."""

    def encode(self, matrix: Fp8Matrix) -> tuple[Tensor, Tensor]:
        """The matrix's codes, in `dtype`, and its scales; copies if the same number has other bits in it."""
        if self.dtype == OCP.dtype:
            return matrix.codes.view(self.dtype), matrix.scales
        return _without_negative_zeros(matrix.codes).view(self.dtype), matrix.scales * self.weight_factor


OCP = Fp8Encoding(torch.float8_e4m3fn, 448.0, 1.0)
"""Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5."""
FNUZ = Fp8Encoding(torch.float8_e4m3fnuz, 240.0, 2.0)
"""An exponent bias that is larger by 1, and NaN in the place of -0. Source: arXiv:2206.02915."""
_AMD_ENCODINGS = {"gfx942": FNUZ, "gfx950": OCP}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a product, as kernels take them."""

    values: Tensor
    """[T, K] numbers or codes, contiguous in the last dimension."""
    scales: Tensor | None
    """[T, groups] float32; None for rows that are not quantised."""


@triton.jit
def _quantize_rows_kernel(
    x,
    codes,
    scales,
    row_stride,
    num_columns,
    group_size,
    num_groups,
    largest_code,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    starts = groups * group_size
    ends = tl.minimum(starts + group_size, num_columns)
    largest = tl.full((GROUPS,), 0.0, tl.float32)
    for first in range(0, group_size, COLUMNS):
        columns = (starts + first)[:, None] + tl.arange(0, COLUMNS)[None, :]
        values = tl.load(x + row * row_stride + columns, mask=columns < ends[:, None], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(values.to(tl.float32)), axis=1))
    scale = tl.maximum(largest, _SMALLEST_MAGNITUDE) / largest_code
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
    for first in range(0, group_size, COLUMNS):
        columns = (starts + first)[:, None] + tl.arange(0, COLUMNS)[None, :]
        values = tl.load(x + row * row_stride + columns, mask=columns < ends[:, None], other=0.0)
        values = values.to(tl.float32) / scale[:, None]
        # Not `clamp`, of which NaN is not a result.
        values = tl.where(values > largest_code, largest_code, tl.where(values < -largest_code, -largest_code, values))
        tl.store(codes + row * num_columns + columns, values.to(codes.dtype.element_ty), mask=columns < ends[:, None])


def device_encoding() -> Fp8Encoding:
    """The encoding of this machine's GPU, or in the interpreter OCP's.

    Raises:
        DeviceError: it has no FP8 matrix instructions.
    """
    if not torch.cuda.is_available():
        return OCP
    device = torch.cuda.current_device()
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        name, encoding = "sm_{}{}".format(*capability), OCP if capability >= _FIRST_NVIDIA_CAPABILITY else None
    else:
        name = gpu_architecture(device)
        encoding = _AMD_ENCODINGS.get(name)
    if encoding is None:
        known = f"sm_89 and later, {' and '.join(_AMD_ENCODINGS)}"
        raise DeviceError(f"--activation-quantization fp8: no FP8 matrix instructions for {name}, only for {known}")
    return encoding


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of products with a matrix are quantised."""

    group_size: int
    """Columns that share a scale: `GROUP_SIZE`, or all."""
    encoding: Fp8Encoding

    @classmethod
    def of(cls, matrix: Fp8Matrix, encoding: Fp8Encoding) -> RowFormat | None:
        """None if groups of the matrix's columns are not whole groups of a row's."""
        num_columns = matrix.shape[1]
        if matrix.group_size >= num_columns:
            return cls(num_columns, encoding) if num_columns else None
        return None if matrix.group_size % GROUP_SIZE else cls(GROUP_SIZE, encoding)

    def quantize(self, x: Tensor) -> Rows:
        """Quantise `x` [T, K], contiguous in the last dimension, group by group."""
        num_rows, num_columns = x.shape
        num_groups = triton.cdiv(num_columns, self.group_size)
        codes = torch.empty((num_rows, num_columns), dtype=self.encoding.dtype, device=x.device)
        scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
        columns = min(triton.next_power_of_2(self.group_size), _NUMBERS)
        groups = min(triton.next_power_of_2(num_groups), _NUMBERS // columns)
        _quantize_rows_kernel[(num_rows, triton.cdiv(num_groups, groups))](
            x,
            codes,
            scales,
            x.stride(0),
            num_columns,
            self.group_size,
            num_groups,
            self.encoding.largest,
            GROUPS=groups,
            COLUMNS=columns,
            num_warps=_NUM_WARPS,
        )
        return Rows(codes, scales)


def _without_negative_zeros(codes: Tensor) -> Tensor:
    """A copy of `codes` [N, K] with 0 for -0; in parts, as a layer's experts may fill much of the memory."""
    copy = torch.empty_like(codes)
    for part, target in zip(codes.split(_CONVERTED_ROWS), copy.split(_CONVERTED_ROWS), strict=True):
        target.copy_(part.masked_fill(part == _NEGATIVE_ZERO, 0))
    return copy
