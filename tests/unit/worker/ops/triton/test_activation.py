"""The activation kernel computes what the reference backend does."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops import load_ops
from services.worker.ops.triton.activation import silu_and_mul
from tests.support.kernels.attention_batches import random


@pytest.mark.parametrize("width", [12, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_gates_the_second_half(width: int, dtype: torch.dtype) -> None:
    x = (4 * random(3, 2 * width)).to(dtype)
    expected = load_ops("reference").silu_and_mul(x)
    # The reference rounds the gate before it multiplies.
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(silu_and_mul(x), expected, atol=tolerance, rtol=tolerance)
