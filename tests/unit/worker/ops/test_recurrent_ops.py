"""Every backend's recurrent layers beside the recurrence itself in float64: in any batch, from any state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops import BACKEND_NAMES, DeltaGates, Ops, load_ops
from tests.support.models.paged_model import attention_metadata

# Key heads, value heads, widths of both; whether the value heads of all key heads lie in turns.
SHAPES = ((2, 4, 8, 16, False), (3, 3, 16, 8, False), (1, 2, 128, 128, False), (2, 6, 8, 16, True), (3, 3, 16, 8, True))
KERNEL_SIZES = (4, 2)
# Decodes alone; prompts around the tiles of 64 tokens; both, decodes first.
BATCHES = ((1, 1, 1), (63, 64, 65), (1, 1, 130, 3, 1))
NUM_SLOTS = 9

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)


def metadata_of(query_lens: Sequence[int], slots: Sequence[int]) -> AttentionMetadata:
    tables = [[0]] * len(query_lens)
    return attention_metadata(
        tables,
        query_lens,
        query_lens,
        block_size=max(query_lens),
        is_prefill=max(query_lens) > 1,
        state_slots=torch.tensor(slots),
    )


def slots_of(query_lens: Sequence[int]) -> list[int]:
    return [(5 * number + 2) % NUM_SLOTS for number in range(len(query_lens))]


def parts_of(rows: Tensor, query_lens: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(rows, list(query_lens))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def convolved(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, of one sequence."""
    padded = torch.cat((state, x))
    size = len(weight)
    outputs = torch.stack([(padded[token : token + size] * weight).sum(0) for token in range(len(x))])
    return F.silu(outputs), padded[len(x) :]


def read_and_written(
    qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, num_key_heads: int
) -> tuple[Tensor, Tensor]:
    """The definition, of one sequence."""
    num_heads, key_dim, value_dim = state.shape
    width = num_key_heads * key_dim
    state, outputs = state.clone(), []
    for token, gate in zip(qkv, gates, strict=True):
        num_shared = num_heads // num_key_heads
        owners = [head % num_key_heads if params.is_tiled else head // num_shared for head in range(num_heads)]
        query, key = (
            (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt())[owners]
            for heads in token[: 2 * width].view(2, num_key_heads, key_dim)
        )
        value, (b, a) = token[2 * width :].view(num_heads, value_dim), gate.view(2, num_heads)
        state *= (params.decay.double() * F.softplus(a + params.bias)).exp()[:, None, None]
        update = b.sigmoid()[:, None] * (value - torch.einsum("hde,hd->he", state, key))
        state += key[:, :, None] * update[:, None]
        outputs.append(torch.einsum("hde,hd->he", state, query) / key_dim**0.5)
    return torch.stack(outputs), state


@every_backend
@pytest.mark.parametrize("query_lens", BATCHES)
@pytest.mark.parametrize("size", KERNEL_SIZES)
def test_a_convolution_continues_from_the_tokens_before(ops: Ops, query_lens: tuple[int, ...], size: int) -> None:
    num_tokens, slots = sum(query_lens), slots_of(query_lens)
    # Rows of a wider projection.
    x, weight = random(num_tokens, 60, seed=1)[:, 4:52], random(size, 48, seed=2)
    state = random(NUM_SLOTS, size - 1, 48, seed=3)
    before = state.clone()
    output = ops.causal_conv(x, weight, state, metadata_of(query_lens, slots))
    for number, (rows, got) in enumerate(zip(parts_of(x, query_lens), parts_of(output, query_lens), strict=True)):
        expected, left = convolved(rows.double(), weight.double(), before[slots[number]].double())
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(state[slots[number]], left.float())
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(state[others], before[others])


@every_backend
@pytest.mark.parametrize("query_lens", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_delta_rule_continues_from_the_state_before(
    ops: Ops, query_lens: tuple[int, ...], shape: tuple[int, int, int, int, bool]
) -> None:
    num_key_heads, num_heads, key_dim, value_dim, is_tiled = shape
    num_tokens, slots = sum(query_lens), slots_of(query_lens)
    qkv = random(num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim, seed=1)
    gates = random(num_tokens, 2 * num_heads, seed=2)
    params = DeltaGates(-random(num_heads, seed=3).exp(), random(num_heads, seed=4), is_tiled)
    # A slot's part lies among those of other layers.
    whole = random(NUM_SLOTS, num_heads * key_dim * value_dim + 32, seed=5)
    state = whole[:, 16:-16].view(NUM_SLOTS, num_heads, key_dim, value_dim)
    before = whole.clone()
    output = ops.gated_delta_rule(qkv, gates, params, state, metadata_of(query_lens, slots))
    assert output.shape == (num_tokens, num_heads, value_dim)
    parts = zip(*(parts_of(each, query_lens) for each in (qkv, gates, output)), slots, strict=True)
    for rows, row_gates, got, slot in parts:
        first = before[slot, 16:-16].view(num_heads, key_dim, value_dim).double()
        expected, left = read_and_written(rows.double(), row_gates.double(), params, first, num_key_heads)
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(state[slot].double(), left, atol=2e-5, rtol=1e-4)
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(whole[others], before[others])
    assert torch.equal(whole[:, :16], before[:, :16])
    assert torch.equal(whole[:, -16:], before[:, -16:])


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_multiply_in_float32(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = random(5, 3, 16, seed=1).to(dtype), random(16, seed=2).to(dtype)
    # Columns of a wider projection.
    gate = random(5, 60, seed=3).to(dtype)[:, 12:].view(5, 3, 16)
    relative = 1e-5 if dtype == torch.float32 else 2**-7
    expected = F.rms_norm(x.double(), (16,), weight.double(), 0.01) * F.silu(gate.double())
    torch.testing.assert_close(ops.gated_rms_norm(x, gate, weight, 0.01).double(), expected, atol=1e-5, rtol=relative)
    for columns in (48, 1):
        rows, gates = x.flatten(1).clone(), gate.flatten(1)[:, :columns]
        expected = rows.double() * gates.double().sigmoid()
        result = ops.mul_sigmoid(rows, gates)
        assert result.data_ptr() == rows.data_ptr()
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=relative)
