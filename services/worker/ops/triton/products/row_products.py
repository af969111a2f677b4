"""The product of a tile of rows with a tile of a matrix, for all products with weight matrices.

    rows as they are        weights become numbers of the rows' dtype
    rows quantised to FP8   codes are multiplied as they are; each group's sum is scaled, and added up in float32

For tiles of 16 rows on NVIDIA, Triton makes float16 of FP8 codes, with equal numbers. A sum over columns may be split
over programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.products.weight_tile import load_tile, load_weights


@triton.jit
def multiply_rows(
    x,
    x_scales,
    rows,
    row_stride,
    codes,
    scales,
    offsets,
    matrix_rows,
    num_columns,
    group_size,
    split,
    num_splits,
    tile: tl.constexpr,
):
    """The products of rows with rows of a matrix, summed in float32 over the columns of one split.

    Args:
        x: Where rows of `num_columns` numbers are, `row_stride` apart.
        x_scales: The rows' scales: see `Rows`.
        rows: [tile.rows] int64: the rows' numbers.
        codes: See `load_weights`, as are `scales`, `offsets`, `num_columns` and `group_size`.
        matrix_rows: [tile.columns] int64.
        split: Which one, of `num_splits`; not read unless `tile.is_split`.

    Returns:
        [tile.rows, tile.columns].
    """
    x_rows = x + rows * row_stride
    first, end = 0, num_columns
    if tile.is_split:
        width = tl.cdiv(tl.cdiv(num_columns, tile.depth), num_splits) * tile.depth
        first = split * width
        end = tl.minimum(first + width, num_columns)
    if x_scales is None:
        summed = _multiply_numbers(
            x_rows, codes, scales, offsets, matrix_rows, first, end, num_columns, group_size, tile
        )
    elif tile.has_groups:
        x_groups = x_scales + rows * tl.cdiv(num_columns, tile.depth)
        summed = _multiply_groups(
            x_rows, x_groups, codes, scales, matrix_rows, first, end, num_columns, group_size, tile
        )
    else:
        summed = _multiply_codes(x_rows, codes, matrix_rows, first, end, num_columns, tile)
        summed *= tl.load(x_scales + rows)[:, None] * tl.load(scales + matrix_rows)[None, :]
    return summed


@triton.jit
def _multiply_numbers(
    x_rows, codes, scales, offsets, matrix_rows, first, end, num_columns, group_size, tile: tl.constexpr
):
    summed = tl.full((tile.rows, tile.columns), 0.0, tl.float32)
    for start in range(first, end, tile.depth):
        columns = start + tl.arange(0, tile.depth)
        x = load_tile(x_rows[:, None] + columns[None, :], (columns < num_columns)[None, :], tile)
        weights = load_weights(codes, scales, offsets, matrix_rows, start, num_columns, group_size, tile)
        summed = tl.dot(x, tl.trans(weights.to(x.dtype)), summed, input_precision="ieee")
    return summed


@triton.jit
def _multiply_groups(
    x_rows, x_groups, codes, scales, matrix_rows, first, end, num_columns, group_size, tile: tl.constexpr
):
    """`tile.depth` columns of a row share a scale, and so do at least as many of the matrix."""
    groups = scales + matrix_rows * tl.cdiv(num_columns, group_size)
    summed = tl.full((tile.rows, tile.columns), 0.0, tl.float32)
    for start in range(first, end, tile.depth):
        columns = start + tl.arange(0, tile.depth)
        has_column = (columns < num_columns)[None, :]
        x = load_tile(x_rows[:, None] + columns[None, :], has_column, tile)
        weights = load_tile(codes + matrix_rows[:, None] * num_columns + columns[None, :], has_column, tile)
        x_scale, scale = tl.load(x_groups + start // tile.depth), tl.load(groups + start // group_size)
        # Not by the scales' product, which would need as many registers as the sums.
        summed += tl.dot(x, tl.trans(weights)) * x_scale[:, None] * scale[None, :]
    return summed


@triton.jit
def _multiply_codes(x_rows, codes, matrix_rows, first, end, num_columns, tile: tl.constexpr):
    """Without scales. NVIDIA's FP8 instructions add up in fewer bits than float32 has, so never more than a tile."""
    summed = tl.full((tile.rows, tile.columns), 0.0, tl.float32)
    for start in range(first, end, tile.depth):
        columns = start + tl.arange(0, tile.depth)
        has_column = (columns < num_columns)[None, :]
        x = load_tile(x_rows[:, None] + columns[None, :], has_column, tile)
        weights = load_tile(codes + matrix_rows[:, None] * num_columns + columns[None, :], has_column, tile)
        summed = tl.dot(x, tl.trans(weights), summed, max_num_imprecise_acc=tile.depth)
    return summed
