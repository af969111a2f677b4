"""Weighted sums of experts' outputs have the order, and the bits, of the reference backend's."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops import load_ops
from services.worker.ops.triton.products.expert_sums import combine_experts, sum_experts
from tests.support.kernels.attention_batches import random

REFERENCE = load_ops("reference")


@pytest.mark.parametrize("num_chosen", [1, 2, 8])
@pytest.mark.parametrize("width", [5, 1030])
def test_a_tokens_sum_is_by_rising_expert(width: int, num_chosen: int) -> None:
    outputs, weights = random(3 * num_chosen, width), random(3, num_chosen, seed=1)
    expert_ids = random(3, 9, seed=2).topk(num_chosen).indices.int()
    total = torch.zeros(3, width)
    for place in expert_ids.argsort(dim=1).T:
        rows = torch.arange(3) * num_chosen + place
        total += weights.flatten()[rows, None] * outputs[rows]
    torch.testing.assert_close(sum_experts(outputs, expert_ids, weights, 9), total, atol=1e-6, rtol=1e-6)


def test_rows_of_experts_that_do_not_exist_are_not_read() -> None:
    outputs = random(4, 8)
    outputs[[1, 2]] = torch.nan
    expert_ids = torch.tensor([[3, -1], [9, 0]], dtype=torch.int32)
    summed = sum_experts(outputs, expert_ids, torch.tensor([[2.0, 1.0], [1.0, 0.5]]), 9)
    assert torch.equal(summed, torch.stack((2 * outputs[0], outputs[3] / 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_from_elsewhere_are_added_in_their_order(dtype: torch.dtype) -> None:
    # Where they come from, rows have a stride.
    outputs = random(10, 70).to(dtype)[:, :65]
    tokens, weights = torch.tensor([3, 0, 0, 3, 3, 5, 1, 0, 5, 5]), random(10, seed=1)
    combined = combine_experts(outputs, tokens, weights, num_tokens=7)
    expected = REFERENCE.combine_experts(outputs, tokens, weights, num_tokens=7)
    assert combined.dtype == dtype
    # The interpreter rounds to bfloat16 towards zero.
    torch.testing.assert_close(combined, expected, atol=1e-6, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6)
    assert not combined[[2, 4, 6]].any()


def test_without_tokens_there_are_no_sums() -> None:
    outputs, tokens, weights = random(0, 3), torch.empty(0, dtype=torch.int64), torch.empty(0)
    assert combine_experts(outputs, tokens, weights, num_tokens=0).shape == (0, 3)
    assert torch.equal(combine_experts(outputs, tokens, weights, num_tokens=2), torch.zeros(2, 3))
