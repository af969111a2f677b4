"""Experts: AITER's fused kernel where it has one, else its grouped product with the rest in torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton.language as tl
from aiter import ActivationType, QuantType
from aiter.fused_moe import fused_moe
from aiter.ops.shuffle import shuffle_weight
from aiter.ops.triton.moe_op import fused_moe as grouped_product
from torch import Tensor

from services.worker.ops.aiter_ops.builds import building
from services.worker.ops.aiter_ops.elementwise import act_and_mul
from services.worker.ops.arguments import Activation
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp, gate_and_up
from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.triton import prepare
from services.worker.ops.triton.state import TritonState

# The rows and columns of a tile of a shuffled matrix, in elements of 16 bits.
_SHUFFLED_TILE = (16, 16)
# The fused kernel's tiles of 128 columns must divide both sizes. Source: AITER,
# csrc/ck_gemm_moe_2stages_codegen/gen_instances.py, A16W16_A8W8_gemm1_heuristic_dispatch.
_FUSED_MULTIPLE = 128

# Rows of a tile of the grouped product: few where an expert has few.
_FEW_ROWS, _MANY_ROWS = 16, 64
# The rest of its tiles, which fit the shared memory of CDNA 3 at least twice.
_PRODUCT_CONFIG = {
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 2,
}
_COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def prepare_experts(
    state: TritonState, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
) -> ExpertsKernel:
    """Take AITER's fused kernel where the sizes fit, else its grouped product; packed experts are our kernels'.

    Raises:
        DeviceError: AITER cannot build its kernel.
    """
    weights = list(experts)
    is_plain = all(isinstance(matrix, Tensor) for expert in weights for matrix in (expert.gate_up, expert.down))
    # A rank of many may have none.
    if not weights or not is_plain:
        return prepare.prepare_experts(state, weights, clamp, dtype)
    first = weights[0]
    hidden, inner = first.down.shape
    has_biases = first.gate_up_bias is not None or first.down_bias is not None
    if clamp is None and not has_biases and hidden % _FUSED_MULTIPLE == inner % _FUSED_MULTIPLE == 0:
        return FusedExperts(weights, dtype)
    return GroupedExperts(weights, clamp, dtype)


class FusedExperts:
    """See `ExpertsKernel`; outputs are added up in `dtype`, in any order."""

    def __init__(self, experts: list[ExpertWeights], dtype: torch.dtype) -> None:
        """Shuffle the matrices as AITER's kernel reads them, and build it.

        Raises:
            DeviceError: AITER cannot build its kernel.
        """
        self._gate_up = _shuffled([each.gate_up for each in experts], dtype)
        self._down = _shuffled([each.down for each in experts], dtype)
        device = self._gate_up.device
        # The last one stands for experts that are elsewhere, which AITER leaves out.
        self._are_here = F.pad(torch.ones(len(experts), dtype=torch.int32, device=device), (0, 1))
        x = torch.zeros(1, self._gate_up.shape[2], dtype=dtype, device=device)
        with building():
            self(x, torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, 1, device=device))

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts: [T, hidden] to a new tensor of its shape."""
        output: Tensor = fused_moe(
            x,
            self._gate_up,
            self._down,
            expert_weights,
            expert_ids,
            expert_mask=self._are_here,
            activation=ActivationType.Silu,
            quant_type=QuantType.No,
        )
        return output


class GroupedExperts:
    """Experts by grouped products; they may have biases and clamps."""

    def __init__(self, experts: list[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype) -> None:
        self._gate_up = torch.stack([dense(each.gate_up, dtype) for each in experts])
        self._down = torch.stack([dense(each.down, dtype) for each in experts])
        self._gate_up_bias = _stacked([each.gate_up_bias for each in experts])
        self._down_bias = _stacked([each.down_bias for each in experts])
        self._clamp = clamp

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts: [T, hidden] to a new tensor of its shape."""
        # In the order in which they are added up.
        expert_ids, order = expert_ids.sort(dim=1)
        expert_weights = expert_weights.gather(1, order)
        runs = _Runs.of(expert_ids, len(self._gate_up))
        projected = x.new_empty((*expert_ids.shape, self._gate_up.shape[1]))
        _multiply(x, self._gate_up, projected, expert_ids, runs, rows_per_token=expert_ids.shape[1])
        if self._gate_up_bias is not None:
            projected += self._gate_up_bias[expert_ids]
        inner = projected.flatten(0, 1)
        inner = act_and_mul(inner, Activation.SILU) if self._clamp is None else gate_and_up(inner, self._clamp)
        # Zeros are what experts that are elsewhere add.
        outputs = x.new_zeros((*expert_ids.shape, x.shape[1]))
        _multiply(inner, self._down, outputs, expert_ids, runs, rows_per_token=1)
        if self._down_bias is not None:
            outputs += self._down_bias[expert_ids]
        return (outputs.float() * expert_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _shuffled(matrices: Sequence[Matrix], dtype: torch.dtype) -> Tensor:
    """The matrices as [E, N, K], in the order in which AITER's kernels load them."""
    device = dense(matrices[0], dtype).device
    shuffled = torch.empty((len(matrices), *matrices[0].shape), dtype=dtype, device=device)
    for place, matrix in zip(shuffled, matrices, strict=True):
        place.copy_(shuffle_weight(dense(matrix, dtype), layout=_SHUFFLED_TILE))
    # AITER builds other kernels for a tensor without this mark, which `shuffle_weight` makes.
    shuffled.__dict__["is_shuffled"] = True
    return shuffled


def _stacked(biases: list[Tensor | None]) -> Tensor | None:
    """[E + 1, N], the last row zero; None if the experts have no biases."""
    present = [bias for bias in biases if bias is not None]
    return F.pad(torch.stack(present), (0, 0, 0, 1)) if present else None


@dataclass(frozen=True, slots=True)
class _Runs:
    """Rows in runs of one expert, each padded to whole tiles."""

    tile_rows: int
    rows: Tensor
    """[at most T k + (E + 1) (tile_rows - 1)] int32: rows by run; `T * k` for padding."""
    tile_experts: Tensor
    """[most tiles] int32: each tile's expert."""
    num_padded: Tensor
    """[1] int32: rows that are multiplied, with padding."""

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> _Runs:
        """Arrange the rows of `expert_ids` [T, k] int32, without waiting for the device.

        Rows of experts that are elsewhere come after those that are multiplied. AITER's own kernel for it is compiled
        anew for every number of tokens.
        """
        flat = expert_ids.flatten().long()
        num_rows, num_runs, device = len(flat), num_experts + 1, flat.device
        tile = _MANY_ROWS if num_rows >= _MANY_ROWS * num_experts else _FEW_ROWS
        counts = torch.zeros(num_runs, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
        ends = ((counts + tile - 1) // tile * tile).cumsum(0)
        sorted_ids, order = flat.sort(stable=True)
        # The padding before each expert's run.
        gaps = F.pad(ends - counts.cumsum(0), (1, 0))
        places = torch.arange(num_rows, device=device) + gaps[sorted_ids]
        most_tiles = num_rows // tile + min(num_runs, num_rows)
        rows = torch.full((most_tiles * tile,), num_rows, dtype=torch.int32, device=device)
        rows.scatter_(0, places, order.to(torch.int32))
        tile_experts = torch.searchsorted(ends // tile, torch.arange(most_tiles, device=device), right=True)
        tile_experts = tile_experts.clamp_(max=num_experts - 1).to(torch.int32)
        return cls(tile, rows, tile_experts, ends[-2:-1].to(torch.int32))


def _multiply(
    x: Tensor, matrices: Tensor, output: Tensor, expert_ids: Tensor, runs: _Runs, *, rows_per_token: int
) -> None:
    """Write each row's product with its expert's matrix, unless the expert is elsewhere.

    Args:
        x: [T * k / rows_per_token, K].
        matrices: [E, N, K].
        output: [T, k, N].
        expert_ids: [T, k].
    """
    grouped_product(
        x,
        matrices,
        output,
        A_scale=None,
        B_scale=None,
        B_zp=None,
        # Not read: outputs are weighted when they are added up, in float32.
        topk_weights=expert_ids,
        topk_ids=expert_ids,
        sorted_token_ids=runs.rows,
        expert_ids=runs.tile_experts,
        num_tokens_post_padded=runs.num_padded,
        mul_routed_weight=False,
        top_k=rows_per_token,
        compute_type=_COMPUTE_TYPES[x.dtype],
        use_fp8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        config={**_PRODUCT_CONFIG, "BLOCK_SIZE_M": runs.tile_rows},
    )
