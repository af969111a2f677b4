"""Adds up each token's weighted outputs of experts, in float32, in the order of the experts, without atomics.

Both sums are of fused products, said in so many words: a compiler that chose could choose differently.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["expert_ids", "expert_weights"])
def _sum_experts_kernel(
    outputs,
    expert_ids,
    expert_weights,
    output,
    num_experts,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    MOST_CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, MOST_CHOSEN)
    has_place = places < NUM_CHOSEN
    ids = tl.load(expert_ids + token * NUM_CHOSEN + places, mask=has_place, other=num_experts)
    weights = tl.load(expert_weights + token * NUM_CHOSEN + places, mask=has_place, other=0.0)
    # How many of the token's experts come before each.
    is_before = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (places[None, :] < places[:, None]))
    ranks = tl.sum(is_before.to(tl.int32), axis=1)
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    for rank in range(NUM_CHOSEN):
        is_next = ranks == rank
        expert = tl.sum(tl.where(is_next, ids, 0), axis=0)
        # A pair whose expert does not exist has no output.
        if (expert >= 0) & (expert < num_experts):
            row = token * NUM_CHOSEN + tl.sum(tl.where(is_next, places, 0), axis=0)
            values = tl.load(outputs + row * WIDTH + columns, mask=columns < WIDTH, other=0.0)
            total = tl.fma(tl.sum(tl.where(is_next, weights, 0.0), axis=0), values.to(tl.float32), total)
    tl.store(output + token * WIDTH + columns, total.to(output.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _sum_rows_kernel(outputs, order, ends, weights, output, row_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    first = tl.load(ends + token - 1, mask=token > 0, other=0)
    for place in range(first, tl.load(ends + token)):
        row = tl.load(order + place)
        values = tl.load(outputs + row * row_stride + columns, mask=columns < WIDTH, other=0.0)
        total = tl.fma(tl.load(weights + row), values.to(tl.float32), total)
    tl.store(output + token * WIDTH + columns, total.to(output.dtype.element_ty), mask=columns < WIDTH)


def sum_experts(outputs: Tensor, expert_ids: Tensor, expert_weights: Tensor, num_experts: int) -> Tensor:
    """Each token's weighted sum, by rising expert.

    Args:
        outputs: [T * k, hidden], contiguous; rows whose expert does not exist are not read.
        expert_ids: [T, k] int32, contiguous, at least one row.
        expert_weights: [T, k] float32, contiguous.

    Returns:
        A new [T, hidden] of the dtype of `outputs`.

    Source: arXiv:1701.06538, equation 1.
    """
    (num_tokens, num_chosen), width = expert_ids.shape, outputs.shape[1]
    output = torch.empty((num_tokens, width), dtype=outputs.dtype, device=outputs.device)
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    _sum_experts_kernel[(num_tokens, triton.cdiv(width, columns))](
        outputs,
        expert_ids,
        expert_weights,
        output,
        num_experts,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        MOST_CHOSEN=triton.next_power_of_2(num_chosen),
        COLUMNS=columns,
        num_warps=_NUM_WARPS,
    )
    return output


def combine_experts(outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
    """Add up each token's outputs of experts, by their weights, in one kernel."""
    width = outputs.shape[1]
    output = torch.empty((num_tokens, width), dtype=outputs.dtype, device=outputs.device)
    if not output.numel():
        return output
    outputs = outputs if outputs.stride(1) == 1 else outputs.contiguous()
    ordered, order = tokens.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_tokens, device=tokens.device), right=True)
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    _sum_rows_kernel[(num_tokens, triton.cdiv(width, columns))](
        outputs,
        order,
        ends,
        weights.contiguous(),
        output,
        outputs.stride(0),
        WIDTH=width,
        COLUMNS=columns,
        num_warps=_NUM_WARPS,
    )
    return output
