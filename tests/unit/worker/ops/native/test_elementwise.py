"""Norms, the activation and greedy sampling on every set of instructions, compared with the `reference` backend.

A result in bfloat16 is rounded once, so it is within 2^-8 of what float32 gives for the same arguments.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.ops import Activation, load_ops
from services.worker.ops.native.backend import NativeOps
from tests.support.kernels.attention_batches import random

REFERENCE = load_ops("reference")
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Whole vectors, parts of them, and enough rows to use several threads: only for these does their number matter.
sizes = pytest.mark.parametrize(
    ("shape", "num_threads"),
    [((1, 576), 1), ((5, 24), 2), ((3, 1), 4), ((2, 100), 1), *(((300, 257), count) for count in (1, 2, 4))],
    indirect=["num_threads"],
)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert that `actual` is `expected`, computed in float32, but for rounding."""
    tolerance = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.float(), expected, atol=1e-5 * float(expected.abs().max()), rtol=tolerance)


@both_types
@sizes
def test_rms_norm_is_the_references(
    ops: NativeOps, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, weight = random(*shape).to(dtype), random(shape[1], seed=1).to(dtype)
    assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.float(), weight.float(), 1e-5))


@both_types
def test_rms_norm_reads_heads_of_any_stride(ops: NativeOps, dtype: torch.dtype) -> None:
    heads, weight = random(5, 7, 48).to(dtype)[:, 2:6, 3:40], random(37, seed=1).to(dtype)
    normed = ops.rms_norm(heads, weight, 1e-5)
    assert normed.is_contiguous()
    assert_close(normed, REFERENCE.rms_norm(heads.float(), weight.float(), 1e-5))


@both_types
@sizes
def test_add_rms_norm_writes_the_sum_and_returns_its_norm(
    ops: NativeOps, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual, weight = (random(*size, seed=seed).to(dtype) for seed, size in enumerate([shape, shape, shape[1:]]))
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(normed, REFERENCE.rms_norm(total.float(), weight.float(), 1e-5))


@both_types
@sizes
def test_layer_norm_is_the_references(
    ops: NativeOps, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = random(shape[0], shape[1] + 3).to(dtype)[:, : shape[1]]
    weight, bias = (random(shape[1], seed=seed).to(dtype) for seed in (1, 2))
    expected = REFERENCE.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)


@sizes
def test_norms_multiply_by_a_weight_in_float32_before_they_round(
    ops: NativeOps, num_threads: int, shape: tuple[int, int]
) -> None:
    x, residual = (random(*shape, seed=seed).bfloat16() for seed in (0, 1))
    # No number of bfloat16 is near: a rounded weight would change half of the results.
    weight = random(shape[1], seed=2).bfloat16().float() + 1 + 2**-9
    assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.float(), weight, 1e-5))
    total = residual + x
    expected = REFERENCE.rms_norm(total.float(), weight, 1e-5)
    assert_close(ops.add_rms_norm(x.clone(), residual, weight, 1e-5), expected)
    assert torch.equal(residual, total)


@both_types
@sizes
@pytest.mark.parametrize("activation", Activation)
def test_act_and_mul_is_the_references(
    ops: NativeOps, num_threads: int, dtype: torch.dtype, shape: tuple[int, int], activation: Activation
) -> None:
    x = random(shape[0], 2 * shape[1]).to(dtype) * 8
    assert_close(ops.act_and_mul(x.clone(), activation), REFERENCE.act_and_mul(x.float(), activation))


@both_types
@sizes
def test_scale_is_the_references(ops: NativeOps, num_threads: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape).to(dtype)
    expected = REFERENCE.scale(x.clone(), 33.75)
    scaled = ops.scale(x, 33.75)
    assert torch.equal(scaled, expected)
    assert scaled.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("activation", Activation)
def test_activations_of_extremes_are_finite_where_the_product_is(ops: NativeOps, activation: Activation) -> None:
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e30, math.nan]])
    output = ops.act_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), activation)
    torch.testing.assert_close(output, torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e30, math.nan]]), equal_nan=True)


@given(rows=st.integers(1, 4), columns=st.integers(1, 70), data=st.data())
@settings(max_examples=40)
def test_greedy_takes_the_lowest_of_the_largest_and_nan_first(
    ops: NativeOps, rows: int, columns: int, data: st.DataObject
) -> None:
    values = st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 2.0, math.inf, math.nan])
    row = st.lists(values, min_size=columns, max_size=columns)
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    token_ids, largest = ops.greedy_sample(logits)
    expected_ids, expected = REFERENCE.greedy_sample(logits)
    torch.testing.assert_close(largest, expected, equal_nan=True, atol=0, rtol=0)
    assert token_ids.tolist() == expected_ids.tolist()


def test_greedy_reads_rows_of_a_wider_tensor(ops: NativeOps, num_threads: int) -> None:
    logits = random(40, 5000)[:, :4099]
    token_ids, largest = ops.greedy_sample(logits)
    assert torch.equal(largest, logits.amax(1))
    assert torch.equal(token_ids, logits.argmax(1))
