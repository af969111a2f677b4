"""Linear layers and embeddings whose weights stay packed."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.matrices import Matrix, dense, in_one_format, split_order
from services.worker.ops.triton.products.fp8_rows import Fp8Encoding, Rows
from services.worker.ops.triton.products.row_products import multiply_rows
from services.worker.ops.triton.products.split_sums import sum_splits
from services.worker.ops.triton.products.tile_sizes import EXACT_NUM_ROWS, TileSizes, choose_sizes, choose_splits
from services.worker.ops.triton.products.weight_tile import DeviceMatrix, load_weights

# An embedding's programs: tokens, and columns of the matrix.
_EMBEDDED_ROWS, _EMBEDDED_COLUMNS = 4, 256
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    bias,
    output,
    num_rows,
    num_outputs,
    num_inputs,
    group_size,
    row_stride,
    tile: tl.constexpr,
):
    rows = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    columns = tl.program_id(1) * tile.columns + tl.arange(0, tile.columns)
    # In place of rows and columns that do not exist, the last one is computed once more, so that no load needs a mask.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    matrix_rows = tl.minimum(columns, num_outputs - 1).to(tl.int64)
    split = tl.program_id(2)
    summed = multiply_rows(
        x,
        x_scales,
        x_rows,
        row_stride,
        codes,
        scales,
        offsets,
        matrix_rows,
        num_inputs,
        group_size,
        split,
        tl.num_programs(2),
        tile,
    )
    if bias is not None:
        summed += tl.load(bias + matrix_rows).to(tl.float32)[None, :]
    places = (split * num_rows + rows).to(tl.int64)[:, None] * num_outputs + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_outputs)[None, :]
    tl.store(output + places, summed.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["token_ids"])
def _embedding_kernel(
    token_ids, codes, scales, offsets, output, num_tokens, num_columns, group_size, tile: tl.constexpr
):
    tokens = tl.program_id(0) * tile.columns + tl.arange(0, tile.columns)
    has_token = tokens < num_tokens
    first = tl.program_id(1) * tile.depth
    rows = tl.load(token_ids + tokens, mask=has_token, other=0)
    values = load_weights(codes, scales, offsets, rows, first, num_columns, group_size, tile)
    columns = first + tl.arange(0, tile.depth)
    places = tokens.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = has_token[:, None] & (columns < num_columns)[None, :]
    tl.store(output + places, values.to(output.dtype.element_ty), mask=mask)


class PackedLinear:
    """See `LinearKernel`: rows times a matrix whose tiles are dequantised in registers, or both in FP8."""

    def __init__(
        self,
        weight: Matrix,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_exact: bool = False,
        encoding: Fp8Encoding | None = None,
    ) -> None:
        """Keep `weight`, without a copy unless `encoding` needs one.

        Args:
            is_exact: Whether tiles have one size and no splits, so that a row's bits do not depend on how many there
                are.
            encoding: What rows are quantised to if `weight` is in FP8; None means that they are not.
        """
        self._matrix = DeviceMatrix.of(in_one_format(weight, dtype), encoding)
        self._bias = bias
        self._dtype = dtype
        self._is_exact = is_exact

    def __call__(self, x: Tensor, *, sizes: TileSizes | None = None, num_splits: int | None = None) -> Tensor:
        """[T, in_features] to a new [T, out_features].

        Args:
            sizes: None means those of `choose_sizes`. Rows that are quantised by group need a depth of `GROUP_SIZE`.
            num_splits: Programs that share the sum of a tile; None means as many as `choose_splits` says.

        Raises:
            ValueError: `x` has another shape or dtype.
        """
        matrix = self._matrix
        num_rows, width = x.shape
        if width != matrix.num_columns or x.dtype is not self._dtype:
            raise ValueError(f"expected [T, {matrix.num_columns}] {self._dtype}, got {list(x.shape)} {x.dtype}")
        output = torch.empty((num_rows, matrix.num_rows), dtype=x.dtype, device=x.device)
        if not output.numel():
            return output
        rows = matrix.take_rows(x)
        if sizes is None:
            counted_rows = EXACT_NUM_ROWS if self._is_exact else num_rows
            sizes = choose_sizes(counted_rows, matrix.num_rows, width, rows.values.dtype)
        num_tiles = triton.cdiv(num_rows, sizes.rows), triton.cdiv(matrix.num_rows, sizes.columns)
        if num_splits is None:
            num_splits = 1 if self._is_exact else choose_splits(prod(num_tiles), triton.cdiv(width, sizes.depth))
        if num_splits == 1:
            self._multiply(rows, self._bias, output, sizes, (*num_tiles, 1))
            return output
        partial = torch.empty((num_splits, *output.shape), dtype=torch.float32, device=x.device)
        self._multiply(rows, None, partial, sizes, (*num_tiles, num_splits))
        sum_splits(partial, self._bias, output)
        return output

    def _multiply(
        self, rows: Rows, bias: Tensor | None, output: Tensor, sizes: TileSizes, grid: tuple[int, int, int]
    ) -> None:
        """Write the products to `output`, [T, N], or those of each split to [splits, T, N].

        Args:
            grid: Tiles of rows and of columns, and splits.
        """
        matrix, is_split = self._matrix, grid[2] > 1
        _linear_kernel[grid](
            rows.values,
            rows.scales,
            matrix.codes,
            matrix.scales,
            matrix.offsets,
            bias,
            output,
            len(rows.values),
            matrix.num_rows,
            matrix.num_columns,
            matrix.group_size,
            rows.values.stride(0),
            tile=matrix.tile(rows=sizes.rows, columns=sizes.columns, depth=sizes.depth, is_split=is_split),
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )


class PackedEmbedding:
    """See `EmbeddingKernel`: rows of a packed matrix."""

    def __init__(self, weight: Matrix, dtype: torch.dtype) -> None:
        """Keep `weight`, without a copy unless its columns are not in order."""
        is_in_order = split_order(weight)[1] is None
        self._matrix = DeviceMatrix.of(weight if is_in_order else dense(weight, dtype))
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64, contiguous, each a row of the matrix, to a new [T, hidden]."""
        matrix, num_tokens = self._matrix, len(token_ids)
        output = torch.empty((num_tokens, matrix.num_columns), dtype=self._dtype, device=token_ids.device)
        if not output.numel():
            return output
        depth = min(triton.next_power_of_2(matrix.num_columns), _EMBEDDED_COLUMNS)
        tile = matrix.tile(rows=1, columns=_EMBEDDED_ROWS, depth=depth)
        _embedding_kernel[(triton.cdiv(num_tokens, _EMBEDDED_ROWS), triton.cdiv(matrix.num_columns, depth))](
            token_ids,
            matrix.codes,
            matrix.scales,
            matrix.offsets,
            output,
            num_tokens,
            matrix.num_columns,
            matrix.group_size,
            tile=tile,
            num_warps=_NUM_WARPS,
        )
        return output
