"""The product of a tile of rows with a tile of a matrix, for all products with weight matrices.

A sum over columns may be split over programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.products.weight_tile import load_tile, load_weights


@triton.jit
def multiply_rows(
    x,
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
    summed = tl.full((tile.rows, tile.columns), 0.0, tl.float32)
    for start in range(first, end, tile.depth):
        columns = start + tl.arange(0, tile.depth)
        x_tile = load_tile(x_rows[:, None] + columns[None, :], (columns < num_columns)[None, :], tile)
        weights = load_weights(codes, scales, offsets, matrix_rows, start, num_columns, group_size, tile)
        summed = tl.dot(x_tile, tl.trans(weights.to(x_tile.dtype)), summed, input_precision="ieee")
    return summed
