"""The activations' kernel computes what the reference backend does."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops import Activation, load_ops
from services.worker.ops.triton.activation import act_and_mul
from tests.support.kernels.attention_batches import random


@pytest.mark.parametrize("width", [12, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", Activation)
def test_act_and_mul_gates_the_second_half(width: int, dtype: torch.dtype, activation: Activation) -> None:
    x = (4 * random(3, 2 * width)).to(dtype)
    expected = load_ops("reference").act_and_mul(x, activation)
    # The reference rounds the gate before it multiplies.
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(act_and_mul(x, activation), expected, atol=tolerance, rtol=tolerance)
