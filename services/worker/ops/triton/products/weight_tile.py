"""What all products with weight matrices share: a tile of weights in any format.

Weights stay in memory as they are kept. A program reads a tile of codes, makes numbers of them in registers, rounds
them to the dtype of the rows as `dense` does, and multiplies:

    codes [columns, depth] -> * scale + offset -> to bfloat16
    rows [rows, depth] x the above, transposed -> added to sums [rows, columns] in float32

Where rows are quantised to FP8, codes of FP8 are multiplied as they are: see `row_products`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.matrices import MXFP4_GROUP_SIZE, BlockMatrix, Fp8Matrix, IntMatrix, JoinedMatrix, Matrix
from services.worker.ops.triton.e4m3 import finite_from_e4m3
from services.worker.ops.triton.products.fp8_rows import Fp8Encoding, RowFormat, Rows

# How `load_weights` makes numbers of codes.
_FLOAT = tl.constexpr(0)
_INT8 = tl.constexpr(1)
_INT4 = tl.constexpr(2)
_MXFP4 = tl.constexpr(3)
_FP8 = tl.constexpr(4)

# The exponent's bits of a float32, from the lowest one up, and the subnormal 2 ** -127.
_EXPONENT_BIT = tl.constexpr(23)
_SMALLEST_POWER = tl.constexpr(1 << 22)
# A float16 has an exponent bias that is larger by 14 than that of E2M1.
_E2M1_FACTOR = tl.constexpr(2.0**14)


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A matrix [N, K], or several of equally many columns one after the other, as kernels take it."""

    kind: int
    codes: Tensor
    """Numbers or codes, contiguous."""
    scales: Tensor | None
    """[N, groups]: see `IntMatrix`, `Fp8Matrix` and, for exponents, `Mxfp4Matrix`; None for plain numbers."""
    offsets: Tensor | None
    group_size: int
    """Columns that share a scale; not more than K."""
    num_rows: int
    num_columns: int
    row_format: RowFormat | None = None
    """What rows are quantised to before they are multiplied with it; None if they are not."""
    column_order: Tensor | None = None
    """See `IntMatrix`."""

    @classmethod
    def of(cls, matrix: Matrix, encoding: Fp8Encoding | None = None) -> DeviceMatrix:
        """Without a copy, unless `encoding` needs one, or the matrix is GGUF's blocks, whose values become integers.

        Args:
            matrix: All of it in one format.
            encoding: What rows are quantised to if the matrix is in FP8.
        """
        assert not isinstance(matrix, JoinedMatrix), "a kernel reads one format"
        num_rows, num_columns = matrix.shape
        if isinstance(matrix, BlockMatrix):
            matrix = matrix.to_integers()
        if isinstance(matrix, Tensor):
            return cls(_FLOAT.value, matrix.contiguous(), None, None, max(num_columns, 1), num_rows, num_columns)
        if isinstance(matrix, IntMatrix):
            kind = _INT8 if matrix.num_bits == 8 else _INT4
            group_size = min(matrix.group_size, max(num_columns, 1))
            sizes = group_size, num_rows, num_columns
            return cls(
                kind.value, matrix.codes, matrix.scales, matrix.offsets, *sizes, column_order=matrix.column_order
            )
        if isinstance(matrix, Fp8Matrix):
            group_size = min(matrix.group_size, max(num_columns, 1))
            row_format = None if encoding is None else RowFormat.of(matrix, encoding)
            codes, scales = (matrix.codes, matrix.scales) if row_format is None else row_format.encoding.encode(matrix)
            return cls(_FP8.value, codes, scales, None, group_size, num_rows, num_columns, row_format)
        return cls(_MXFP4.value, matrix.codes, matrix.exponents, None, MXFP4_GROUP_SIZE, num_rows, num_columns)

    def take_rows(self, x: Tensor) -> Rows:
        """`x` [T, K] as products with the matrix take it."""
        if self.column_order is not None:
            x = x.index_select(1, self.column_order)
        x = x if x.stride(1) == 1 else x.contiguous()
        return Rows(x, None) if self.row_format is None else self.row_format.quantize(x)

    def tile(self, *, rows: int, columns: int, depth: int, is_split: bool = False) -> Tile:
        """The constants for programs of this size."""
        return Tile(
            kind=self.kind,
            has_offsets=self.offsets is not None,
            rows=rows,
            columns=columns,
            depth=depth,
            run=_common_run(self.group_size, self.num_columns, depth),
            has_tail=self.num_columns % depth > 0,
            has_groups=self.group_size < self.num_columns,
            is_split=is_split,
        )


class Tile(NamedTuple):
    """The constants that a product's kernel is compiled for; sizes are powers of two."""

    kind: int
    has_offsets: bool
    rows: int
    """Rows of a program, at least 16."""
    columns: int
    """Columns of its result, which are rows of the matrix; at least 16."""
    depth: int
    """Columns of the matrix that are read at a time, at least 16."""
    run: int
    """Aligned runs of this many columns have one scale."""
    has_tail: bool
    """Whether the matrix's last columns are fewer than `depth`."""
    has_groups: bool
    """Whether not all columns have the same scale."""
    is_split: bool
    """Whether several programs share the sum over the matrix's columns."""


def _common_run(group_size: int, num_columns: int, depth: int) -> int:
    """The longest power of two up to `depth` that divides the groups, except that one group may have all columns."""
    return depth if group_size >= num_columns else min(group_size & -group_size, depth)


@triton.jit
def load_weights(codes, scales, offsets, rows, first, num_columns, group_size, tile: tl.constexpr):
    """A tile of a matrix [N, num_columns] in float32, or as it is kept if that is plain.

    Args:
        codes: See `DeviceMatrix`, as are `scales`, `offsets` and `group_size`.
        rows: [n] int64, each in [0, N).
        first: The tile's first column, a multiple of `tile.depth`.

    Returns:
        [n, tile.depth]. Columns outside of the matrix have finite numbers.
    """
    columns = first + tl.arange(0, tile.depth)
    places, has_column = rows[:, None] * num_columns + columns[None, :], (columns < num_columns)[None, :]
    if tile.kind == _FLOAT:
        values = load_tile(codes + places, has_column, tile)
    elif tile.kind == _INT8:
        stored = load_tile(codes + places, has_column, tile)
        values = _scaled(stored.to(tl.float32), scales, offsets, rows, first, num_columns, group_size, tile)
    elif tile.kind == _FP8:
        stored = load_tile(codes + places, has_column, tile)
        values = _scaled(finite_from_e4m3(stored), scales, offsets, rows, first, num_columns, group_size, tile)
    else:
        pairs = first // 2 + tl.arange(0, tile.depth // 2)
        num_pairs = num_columns // 2
        stored = load_tile(codes + rows[:, None] * num_pairs + pairs[None, :], (pairs < num_pairs)[None, :], tile)
        nibbles = tl.interleave(stored & 0xF, stored >> 4)
        numbers = nibbles.to(tl.float32) - 8.0 if tile.kind == _INT4 else _e2m1(nibbles)
        values = _scaled(numbers, scales, offsets, rows, first, num_columns, group_size, tile)
    return values


@triton.jit
def load_tile(places, mask, tile: tl.constexpr):
    """Numbers or codes at `places`; zeros outside of `mask`, which is not read if the matrix has whole tiles."""
    return tl.load(places, mask=mask, other=0.0) if tile.has_tail else tl.load(places)


@triton.jit
def _e2m1(codes):
    """The numbers of codes below 16, in float32; as `finite_from_e4m3`."""
    halves = ((codes & 8).to(tl.uint16) << 12) | ((codes & 7).to(tl.uint16) << 9)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * _E2M1_FACTOR


@triton.jit
def _scaled(values, scales, offsets, rows, first, num_columns, group_size, tile: tl.constexpr):
    """`values * scale + offset` with those of each group."""
    num_runs: tl.constexpr = tile.depth // tile.run
    starts = first + tl.arange(0, num_runs) * tile.run
    places = rows[:, None] * tl.cdiv(num_columns, group_size) + (starts // group_size)[None, :]
    has_column = (starts < num_columns)[None, :]
    values = values.reshape(values.shape[0], num_runs, tile.run)
    scale = load_tile(scales + places, has_column, tile)
    if tile.kind == _MXFP4:
        powers = scale.to(tl.int32)
        powers = tl.where(powers == 0, _SMALLEST_POWER, powers << _EXPONENT_BIT)
        scale = powers.to(tl.float32, bitcast=True)
    values = values * scale[:, :, None]
    if tile.has_offsets:
        values += load_tile(offsets + places, has_column, tile)[:, :, None]
    return values.reshape(values.shape[0], tile.depth)
