"""Rows of each head times a matrix of that head, exactly: a row's bits do not depend on how many there are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.products.row_products import multiply_rows
from services.worker.ops.triton.products.tile_sizes import EXACT_NUM_ROWS, choose_sizes
from services.worker.ops.triton.products.weight_tile import DeviceMatrix


@triton.jit(do_not_specialize=["num_rows"])
def _per_head_kernel(x, weight, output, num_rows, num_outputs, num_inputs, row_stride, head_stride, tile: tl.constexpr):
    head = tl.program_id(2)
    rows = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    columns = tl.program_id(1) * tile.columns + tl.arange(0, tile.columns)
    # In place of rows and columns that do not exist, the last one is computed once more, so that no load needs a mask.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    matrix_rows = head.to(tl.int64) * num_outputs + tl.minimum(columns, num_outputs - 1)
    summed = multiply_rows(
        x + head.to(tl.int64) * head_stride,
        None,
        x_rows,
        row_stride,
        weight,
        None,
        None,
        matrix_rows,
        num_inputs,
        num_inputs,
        0,
        1,
        tile,
    )
    places = (rows.to(tl.int64)[:, None] * tl.num_programs(2) + head) * num_outputs + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_outputs)[None, :]
    tl.store(output + places, summed.to(output.dtype.element_ty), mask=mask)


class ExactPerHeadLinear:
    """A product with one matrix for each head, in tiles of one size."""

    def __init__(self, weight: Tensor) -> None:
        """Copy `weight` [H, out_features, in_features] unless it is contiguous."""
        self._num_heads = len(weight)
        self._matrix = DeviceMatrix.of(weight.contiguous().flatten(0, 1))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, in_features], contiguous in the last dimension, to a new [T, H, out_features]."""
        matrix, num_rows = self._matrix, len(x)
        num_outputs = matrix.num_rows // self._num_heads
        output = torch.empty((num_rows, self._num_heads, num_outputs), dtype=x.dtype, device=x.device)
        if not output.numel():
            return output
        sizes = choose_sizes(EXACT_NUM_ROWS, num_outputs, matrix.num_columns, x.dtype)
        tile = matrix.tile(rows=sizes.rows, columns=sizes.columns, depth=sizes.depth)
        grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.columns), self._num_heads)
        _per_head_kernel[grid](
            x,
            matrix.codes,
            output,
            num_rows,
            num_outputs,
            matrix.num_columns,
            x.stride(0),
            x.stride(1),
            tile=tile,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )
        return output
