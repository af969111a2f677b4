"""The kernels of recurrent layers for every processor, beside torch's, with parts of vectors and in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops import DeltaGates, Ops, recurrent
from tests.support.models.paged_model import attention_metadata

# One token, blocks in tiles of 32 and less, and a block with a token left over.
QUERY_LENS = (1, 40, 5)
SLOTS = (4, 0, 2)
# Key heads, value heads, widths: whole blocks of columns, vectors after them, parts of vectors, and an odd key; whether
# the value heads of all key heads lie in turns.
SHAPES = ((1, 2, 32, 128, False), (2, 4, 16, 80, False), (2, 2, 9, 13, False), (3, 6, 16, 80, True))
DTYPES = (torch.float32, torch.bfloat16)

METADATA = attention_metadata(
    [[0]] * 3, QUERY_LENS, QUERY_LENS, block_size=64, is_prefill=True, state_slots=torch.tensor(SLOTS)
)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Both are rounded once from sums in another order."""
    tolerance = 2e-5 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_channels", "num_taps"), [(300, 4), (23, 3), (16, 9)])
def test_a_convolution_is_that_of_torch(ops: Ops, dtype: torch.dtype, num_channels: int, num_taps: int) -> None:
    x = random(sum(QUERY_LENS), num_channels + 5, seed=1).to(dtype)[:, 3:-2]
    weight = random(num_taps, num_channels, seed=2).to(dtype)
    state = random(5, num_taps - 1, num_channels, seed=3).to(dtype)
    other = state.clone()
    assert_close(ops.causal_conv(x, weight, state, METADATA), recurrent.causal_conv(x, weight, other, METADATA))
    assert torch.equal(state, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_delta_rule_is_that_of_torch(ops: Ops, dtype: torch.dtype, shape: tuple[int, int, int, int, bool]) -> None:
    num_key_heads, num_heads, key_dim, value_dim, is_tiled = shape
    qkv = random(sum(QUERY_LENS), 2 * num_key_heads * key_dim + num_heads * value_dim, seed=1).to(dtype)
    gates = random(sum(QUERY_LENS), 2 * num_heads + 3, seed=2).to(dtype)[:, 3:]
    params = DeltaGates(-random(num_heads, seed=3).exp(), random(num_heads, seed=4), is_tiled)
    state = random(5, num_heads, key_dim, value_dim, seed=5)
    other = state.clone()
    output = ops.gated_delta_rule(qkv, gates, params, state, METADATA)
    assert_close(output, recurrent.gated_delta_rule(qkv, gates, params, other, METADATA))
    assert_close(state, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_those_of_torch(ops: Ops, dtype: torch.dtype) -> None:
    x, gate, weight = (random(*shape, seed=len(shape)).to(dtype) for shape in ((7, 3, 21), (7, 70), (21,)))
    gate = gate[:, 7:].view(7, 3, 21)
    assert_close(ops.gated_rms_norm(x, gate, weight, 0.01), recurrent.gated_rms_norm(x, gate, weight, 0.01))
    for columns in (63, 1):
        rows, gates = x.flatten(1), gate.flatten(1)[:, :columns]
        assert_close(ops.mul_sigmoid(rows.clone(), gates), recurrent.mul_sigmoid(rows.clone(), gates))


def test_what_is_not_finite_stays_with_its_sequence(ops: Ops) -> None:
    qkv, gates = random(46, 2 * 16 + 2 * 16, seed=1), random(46, 4, seed=2)
    params = DeltaGates(-torch.ones(2), torch.zeros(2))
    state = random(5, 2, 16, 16, seed=3)
    state[0] = torch.nan
    state[1] = torch.inf
    output = ops.gated_delta_rule(qkv, gates, params, state, METADATA)
    assert output[1:41].isnan().all()
    assert output[0].isfinite().all()
    assert output[41:].isfinite().all()
    assert torch.equal(state[1], torch.full((2, 16, 16), torch.inf))
