"""Exact products of each head's rows are those of the matrices."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.triton.products.per_head import ExactPerHeadLinear
from tests.support.kernels.attention_batches import random


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_outputs", "num_inputs"), [(1, 1, 1, 1), (3, 5, 40, 24), (70, 2, 33, 160)]
)
def test_each_head_has_its_own_matrix(num_rows: int, num_heads: int, num_outputs: int, num_inputs: int) -> None:
    # A part of wider heads, as the plain part of a query is, and the transposed weight of the other direction.
    x = random(num_rows, num_heads, num_inputs + 3)[:, :, 1:-2]
    weight = random(num_heads, num_inputs, num_outputs, seed=1).transpose(1, 2)
    output = ExactPerHeadLinear(weight)(x)
    assert output.is_contiguous()
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


def test_without_rows_there_is_nothing_to_compute() -> None:
    assert ExactPerHeadLinear(random(2, 5, 3))(torch.empty(0, 2, 3)).shape == (0, 2, 5)
