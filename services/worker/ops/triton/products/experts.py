"""Mixtures of experts: two grouped products, the first with the activation, and each token's weighted sum.

No sum over columns is split over programs: a token by its 4 to 8 experts has hundreds of tiles already, unless many
ranks share each expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.experts import ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix, in_one_format
from services.worker.ops.matrix_rows import copy_matrix, join_rows
from services.worker.ops.triton.products.expert_runs import ExpertRuns, arrange_pairs
from services.worker.ops.triton.products.expert_sums import sum_experts
from services.worker.ops.triton.products.fp8_rows import Fp8Encoding
from services.worker.ops.triton.products.row_products import multiply_rows
from services.worker.ops.triton.products.tile_sizes import EXACT_NUM_ROWS, TileSizes, choose_rows, choose_sizes
from services.worker.ops.triton.products.weight_tile import DeviceMatrix


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of both products, which have equally many rows."""

    gate_up: TileSizes
    down: TileSizes


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    bias,
    output,
    arranged,
    tile_experts,
    num_pairs,
    num_experts,
    num_matrix_rows,
    num_inputs,
    group_size,
    row_stride,
    pairs_per_row,
    alpha,
    limit,
    tile: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_CLAMP: tl.constexpr,
):
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert >= num_experts:
        return
    pairs = tl.load(arranged + tl.program_id(0) * tile.rows + tl.arange(0, tile.rows))
    has_pair = pairs < num_pairs
    # Padding computes the first pair once more, and the same for columns, so that no load needs a mask.
    x_rows = (tl.where(has_pair, pairs, 0) // pairs_per_row).to(tl.int64)
    numbers = tl.program_id(1) * tile.columns + tl.arange(0, tile.columns)
    if IS_GATED:
        # Rows of the gate and of up in turn, so that a program has both of each column.
        width = num_matrix_rows // 2
        numbers = numbers % 2 * width + tl.minimum(numbers // 2, width - 1)
    else:
        width = num_matrix_rows
        numbers = tl.minimum(numbers, width - 1)
    matrix_rows = expert.to(tl.int64) * num_matrix_rows + numbers
    summed = multiply_rows(
        x, x_scales, x_rows, row_stride, codes, scales, offsets, matrix_rows, num_inputs, group_size, 0, 1, tile
    )
    if bias is not None:
        summed += tl.load(bias + matrix_rows).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = tl.split(summed.reshape(tile.rows, tile.columns // 2, 2))
        _store_pairs(output, pairs, has_pair, _gate_and_up(gate, up, alpha, limit, HAS_CLAMP), width)
    else:
        _store_pairs(output, pairs, has_pair, summed, width)


@triton.jit
def _store_pairs(output, pairs, has_pair, values, width):
    columns = tl.program_id(1) * values.shape[1] + tl.arange(0, values.shape[1])
    places = pairs.to(tl.int64)[:, None] * width + columns[None, :]
    mask = has_pair[:, None] & (columns < width)[None, :]
    tl.store(output + places, values.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _gate_and_up(gate, up, alpha, limit, HAS_CLAMP: tl.constexpr):
    if HAS_CLAMP:
        # Not `minimum`, of which NaN is not a result.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    else:
        result = gate * tl.sigmoid(gate) * up
    return result


class TritonExperts:
    """See `Ops.prepare_experts`. A pair whose expert does not exist adds nothing."""

    def __init__(
        self,
        experts: Iterable[ExpertWeights],
        clamp: SwigluClamp | None,
        dtype: torch.dtype,
        *,
        is_exact: bool = False,
        encoding: Fp8Encoding | None = None,
    ) -> None:
        """Join the experts' matrices, in the format that all of them have, else dense.

        `is_exact` and `encoding` mean what they do in `PackedLinear`.
        """
        self._is_exact = is_exact
        gate_up, down = _Stack(dtype), _Stack(dtype)
        for expert in experts:
            gate_up.append(expert.gate_up, expert.gate_up_bias)
            down.append(expert.down, expert.down_bias)
        self._num_experts = len(down)
        self._clamp = clamp
        # A rank of many may have none.
        if self._num_experts:
            self._gate_up, self._gate_up_bias = gate_up.join(encoding)
            self._down, self._down_bias = down.join(encoding)

    def __call__(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *, sizes: ExpertSizes | None = None
    ) -> Tensor:
        """See `ExpertsKernel`.

        Args:
            sizes: None means those of `choose_rows` and `choose_sizes`.
        """
        num_pairs = expert_ids.numel()
        if not num_pairs or not self._num_experts:
            return torch.zeros_like(x)
        expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.contiguous()
        gate_up, down = (None, None) if sizes is None else (sizes.gate_up, sizes.down)
        tile_rows = self._choose_rows(num_pairs, x.dtype) if gate_up is None else gate_up.rows
        runs = arrange_pairs(expert_ids, self._num_experts, tile_rows)
        inner = torch.empty((num_pairs, self._down.num_columns), dtype=x.dtype, device=x.device)
        self._multiply(x, self._gate_up, self._gate_up_bias, inner, runs, expert_ids.shape[1], gate_up)
        outputs = torch.empty((num_pairs, x.shape[1]), dtype=x.dtype, device=x.device)
        self._multiply(inner, self._down, self._down_bias, outputs, runs, 1, down)
        return sum_experts(outputs, expert_ids, expert_weights, self._num_experts)

    def _choose_rows(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Rows of a tile: as many as experts have pairs if all have equally many."""
        return choose_rows(EXACT_NUM_ROWS if self._is_exact else triton.cdiv(num_pairs, self._num_experts), dtype)

    def _multiply(
        self,
        x: Tensor,
        matrix: DeviceMatrix,
        bias: Tensor | None,
        output: Tensor,
        runs: ExpertRuns,
        pairs_per_row: int,
        sizes: TileSizes | None,
    ) -> None:
        """Write each pair's row of `output`: the product with its expert's matrix, and after the first the activation.

        Args:
            x: [T * k / pairs_per_row, K].
            matrix: The experts' ones, each with the same number of rows.
            output: [T * k, width], contiguous. Rows of experts that do not exist are not written.
            sizes: With `runs.tile_rows` rows; None means those of `choose_sizes`.
        """
        rows = matrix.take_rows(x)
        if sizes is None:
            sizes = choose_sizes(runs.tile_rows, matrix.num_rows, matrix.num_columns, rows.values.dtype)
        num_rows = matrix.num_rows // self._num_experts
        clamp = self._clamp or SwigluClamp(0.0, 0.0)
        _experts_kernel[(runs.num_tiles, triton.cdiv(num_rows, sizes.columns))](
            rows.values,
            rows.scales,
            matrix.codes,
            matrix.scales,
            matrix.offsets,
            bias,
            output,
            runs.pairs,
            runs.tile_experts,
            len(output),
            self._num_experts,
            num_rows,
            matrix.num_columns,
            matrix.group_size,
            rows.values.stride(0),
            pairs_per_row,
            clamp.alpha,
            clamp.limit,
            tile=matrix.tile(rows=sizes.rows, columns=sizes.columns, depth=sizes.depth),
            IS_GATED=matrix is self._gate_up,
            HAS_CLAMP=self._clamp is not None,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )


class _Stack:
    """Matrices that are read one by one, and their biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._matrices: list[Matrix] = []
        self._biases: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._matrices)

    def append(self, matrix: Matrix, bias: Tensor | None) -> None:
        """Copy a matrix, which may be overwritten when the next one is read."""
        self._matrices.append(copy_matrix(in_one_format(matrix, self._dtype)))
        if bias is not None:
            self._biases.append(bias.clone())

    def join(self, encoding: Fp8Encoding | None) -> tuple[DeviceMatrix, Tensor | None]:
        """The rows of all matrices, one after the other, and of the biases; the stack is empty afterwards."""
        joined = in_one_format(join_rows(self._matrices, self._dtype), self._dtype)
        bias = torch.cat(self._biases) if self._biases else None
        # Before the codes may be copied once more.
        self._matrices.clear()
        return DeviceMatrix.of(joined, encoding), bias
