"""The rotation looks up positions itself and computes what the reference backend does."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops import RopeRows, load_ops
from services.worker.ops.triton.rope import rope
from tests.support.kernels.attention_batches import random

POSITIONS = torch.tensor([0, 7, 49, 7])


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 16), (80, 80), (80, 20), (128, 128)])
@pytest.mark.parametrize("num_heads", [1, 5, 24])
def test_rope_rotates_heads_in_place_and_nothing_else(
    num_heads: int, head_dim: int, rotary_dim: int, is_interleaved: bool
) -> None:
    ops = load_ops("reference")
    cos, sin = random(50, rotary_dim // 2), random(50, rotary_dim // 2, seed=1)
    tables = RopeRows(cos, sin, POSITIONS, is_interleaved)
    # Where the fused projection leaves them, with other heads after each token's.
    fused = random(4, num_heads + 3, head_dim)
    expected = fused.clone()
    ops.rope(expected[:, :num_heads], ops.select_rope(tables, POSITIONS))
    rope(fused[:, :num_heads], tables)
    torch.testing.assert_close(fused, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(fused[:, num_heads:], expected[:, num_heads:])
    assert torch.equal(fused[..., rotary_dim:], expected[..., rotary_dim:])
