"""The norm kernels compute what the reference backend does, for rows of any width and stride."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops import load_ops
from services.worker.ops.triton.norm import add_rms_norm, layer_norm, rms_norm
from tests.support.kernels.attention_batches import random
from tests.support.pairwise import some_of

REFERENCE = load_ops("reference")
EPS = 0.1

# The type is that of loads and stores alone, so each width has one; the other combinations are left to `make proofs`.
every_width = some_of(
    [(16, torch.float32), (80, torch.bfloat16), (1000, torch.float32), (1000, torch.bfloat16), (1024, torch.float32)],
    width=[16, 80, 1000, 1024],
    dtype=[torch.float32, torch.bfloat16],
)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    is_float32 = expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5 if is_float32 else 0.02, rtol=1e-5 if is_float32 else 0.01)


@every_width
def test_rms_norm_of_rows_with_a_stride(width: int, dtype: torch.dtype) -> None:
    x, weight = random(5, width + 3).to(dtype)[:, :width], random(width, seed=1).to(dtype)
    normed = rms_norm(x, weight, EPS)
    assert normed.is_contiguous()
    assert_close(normed, REFERENCE.rms_norm(x, weight, EPS))


def test_norms_multiply_by_a_weight_in_float32() -> None:
    x, residual, weight = random(5, 80).bfloat16(), random(5, 80, seed=1).bfloat16(), random(80, seed=2)
    assert_close(rms_norm(x, weight, EPS), REFERENCE.rms_norm(x, weight, EPS))
    total = residual.clone()
    normed = add_rms_norm(x.clone(), total, weight, EPS)
    assert_close(normed, REFERENCE.add_rms_norm(x.clone(), residual, weight, EPS))


@some_of(
    [(1, 80), (3, 16), (3, 80), (20, 80), (20, 128)],
    num_heads=[1, 3, 20],
    head_dim=[16, 80, 128],
)
def test_rms_norm_of_heads_where_the_fused_projection_left_them(num_heads: int, head_dim: int) -> None:
    heads, weight = random(4, num_heads + 5, head_dim)[:, 2 : num_heads + 2], random(head_dim, seed=1)
    assert_close(rms_norm(heads, weight, EPS), REFERENCE.rms_norm(heads, weight, EPS))


@every_width
def test_add_rms_norm_writes_the_sum_into_the_residual(width: int, dtype: torch.dtype) -> None:
    x, residual = random(5, width).to(dtype), random(5, width, seed=1).to(dtype)
    weight = random(width, seed=2).to(dtype)
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x.clone(), expected_residual, weight, EPS)
    normed = add_rms_norm(x, residual, weight, EPS)
    assert_close(normed, expected)
    # The interpreter rounds to bfloat16 towards zero.
    assert_close(residual, expected_residual)
    # The sum is rounded before it is normalised.
    assert torch.equal(normed, rms_norm(residual, weight, EPS))


@every_width
def test_layer_norm_of_rows_with_a_stride_and_a_large_mean(width: int, dtype: torch.dtype) -> None:
    x = (random(5, width + 3)[:, :width] + 8).to(dtype)
    weight, bias = random(width, seed=1).to(dtype), random(width, seed=2).to(dtype)
    assert_close(layer_norm(x, weight, bias, EPS), REFERENCE.layer_norm(x, weight, bias, EPS))


def test_a_rows_nan_stays_its_own() -> None:
    x, weight = random(3, 80), random(80, seed=1)
    x[1, 7] = torch.nan
    assert rms_norm(x, weight, EPS).isnan().any(-1).tolist() == [False, True, False]
