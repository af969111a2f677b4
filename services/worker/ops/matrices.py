"""Weight matrices [out_features, in_features] in the formats that products are computed with.

A matrix is a tensor in the dtype of its products, or one of the classes below. Every backend takes all of them: one
without kernels for a format calls `dense`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from services.worker.ops.block_types import BlockType


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """Integers with scales: element [n, k] is `code[n, k] * scales[n, g] + offsets[n, g]`, g = k // group_size.

    Tensors are contiguous. It has no dtype of its own: its products have the dtype that it is prepared for.
    """

    num_bits: int
    """8 or 4."""
    codes: Tensor
    """8 bits: [N, K] int8. 4 bits: [N, K / 2] uint8, two codes in a byte, that of the even column in the low half, each
    with 8 added; so codes are in [-8, 7], and K is even."""
    scales: Tensor
    """[N, ceil(K / group_size)] float32."""
    group_size: int
    """Columns that share a scale; K or more for one scale per row."""
    offsets: Tensor | None = None
    """Like `scales`; None means zeros."""
    column_order: Tensor | None = None
    """[K] int64, a permutation: the matrix's column `column_order[k]` is stored, and grouped, as column k. None means
    that columns are in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_rows, width = self.codes.shape
        return num_rows, width * (8 // self.num_bits)

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """A new [N, K] in `dtype`; computed in float32."""
        codes = self.codes
        if self.num_bits == 4:
            codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1).to(torch.int8) - 8
        num_columns = self.shape[1]
        values = codes.float().mul_(_by_column(self.scales, self.group_size, num_columns))
        if self.offsets is not None:
            values += _by_column(self.offsets, self.group_size, num_columns)
        if self.column_order is not None:
            values = torch.empty_like(values).index_copy_(1, self.column_order, values)
        return values.to(dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """4-bit floats with a power of two per 32 columns: `values[code[n, k]] * 2 ** (exponents[n, k // 32] - 127)`.

    Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
    """

    codes: Tensor
    """[N, K / 2] uint8, two codes in a byte, that of the even column in the low half."""
    exponents: Tensor
    """[N, K / 32] uint8; 255, which is NaN, does not occur."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_rows, width = self.codes.shape
        return num_rows, 2 * width

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """A new [N, K] in `dtype`; computed in float32."""
        codes = torch.stack((self.codes & 0xF, self.codes >> 4), dim=-1).flatten(1).int()
        values = torch.tensor(MXFP4_VALUES, device=codes.device)[codes]
        exponents = _by_column(self.exponents.int() - 127, MXFP4_GROUP_SIZE, self.shape[1])
        return torch.ldexp(values, exponents).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """8-bit floats (E4M3) with scales: element [n, k] is the number with the bits `codes[n, k]`, times `scales[n, g]`.

    Here g = k // group_size, and tensors are contiguous. Source: arXiv:2209.05433, section 3.
    """

    codes: Tensor
    """[N, K] uint8, the bits of a `torch.float8_e4m3fn`; NaN, 127 and 255, does not occur."""
    scales: Tensor
    """[N, ceil(K / group_size)] float32."""
    group_size: int
    """Columns that share a scale; K or more for one scale per row."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_rows, num_columns = self.codes.shape
        return num_rows, num_columns

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """A new [N, K] in `dtype`; computed in float32."""
        values = self.codes.view(torch.float8_e4m3fn).float()
        return values.mul_(_by_column(self.scales, self.group_size, self.shape[1])).to(dtype)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """GGUF's blocks as they are stored; see `block_types`."""

    block_type: BlockType
    blocks: Tensor
    """[N, K / values of a block, bytes of a block] uint8, contiguous."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.blocks.shape[0], self.blocks.shape[1] * self.block_type.num_values

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """A new [N, K] in `dtype`; computed in float32."""
        return self.block_type.dequantize(self.blocks).to(dtype)

    def to_integers(self) -> IntMatrix:
        """A new matrix of integers with float32 scales: the same values, but for the rounding of offsets."""
        block_type = self.block_type
        parts = block_type.split(self.blocks)
        scales = parts.scales.floats()
        offsets = None if parts.offsets is None else parts.offsets.floats()
        if block_type.num_bits > 4 or block_type.table is not None:
            codes = block_type.values(parts.codes).to(torch.int8)
            return IntMatrix(8, codes, scales, block_type.group_size, offsets)
        codes, missing = parts.codes, 8 - block_type.zero
        if (1 << block_type.num_bits) + missing <= 16:
            codes = codes + missing
        elif offsets is not None:
            offsets.add_(scales, alpha=missing)
        return IntMatrix(4, in_pairs(codes), scales, block_type.group_size, offsets)


@dataclass(frozen=True, slots=True)
class JoinedMatrix:
    """Matrices of equally many columns in different formats, one after the other."""

    parts: tuple[Matrix, ...]
    """At least two, none of them joined itself."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """A new [N, K] in `dtype`; computed in float32."""
        return torch.cat([dense(part, dtype) for part in self.parts])


MXFP4_GROUP_SIZE = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Matrix: TypeAlias = Tensor | IntMatrix | Mxfp4Matrix | Fp8Matrix | BlockMatrix | JoinedMatrix


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix as a tensor in `dtype`: itself, or a new one."""
    return matrix if isinstance(matrix, Tensor) else matrix.to_dense(dtype)


def in_one_format(matrix: Matrix, dtype: torch.dtype) -> Matrix:
    """The matrix itself, or as a new tensor in `dtype` if its parts have several formats."""
    return matrix.to_dense(dtype) if isinstance(matrix, JoinedMatrix) else matrix


def in_pairs(codes: Tensor) -> Tensor:
    """Codes below 16 [N, K] uint8 as a new [N, K / 2], that of the even column in the low half; K is even."""
    pairs = codes.view(len(codes), codes.shape[1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def split_order(matrix: Matrix) -> tuple[Matrix, Tensor | None]:
    """The matrix as it is stored, and the order of its columns, in which rows must be for a product with it."""
    if isinstance(matrix, IntMatrix) and matrix.column_order is not None:
        return replace(matrix, column_order=None), matrix.column_order
    return matrix, None


def _by_column(values: Tensor, group_size: int, num_columns: int) -> Tensor:
    """[N, groups] to [N, num_columns], or [N, 1] where one group has all columns."""
    return values if values.shape[1] == 1 else values.repeat_interleave(group_size, dim=1)[:, :num_columns]
