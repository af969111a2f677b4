"""The kernels of recurrent layers beside torch's; walked, a sequence has the same bits in any division."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops import DeltaGates, recurrent
from services.worker.ops.triton.recurrent import (
    causal_conv,
    exact_causal_conv,
    exact_delta_rule,
    gated_delta_rule,
    gated_rms_norm,
    mul_sigmoid,
)
from tests.support.kernels.attention_batches import random
from tests.support.models.paged_model import attention_metadata

SLOTS = (4, 0, 2)
BATCHES = ((1, 1, 1), (1, 6, 3))
NUM_KEY_HEADS, NUM_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 12, 40
PARAMS = DeltaGates(-random(NUM_HEADS, seed=3).exp(), random(NUM_HEADS, seed=4))
WIDTH = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM


def metadata_of(
    query_lens: tuple[int, ...], slots: tuple[int, ...] = SLOTS, *, is_prefill: bool = True
) -> AttentionMetadata:
    tables, state_slots = [[0]] * len(query_lens), torch.tensor(slots)
    return attention_metadata(
        tables, query_lens, query_lens, block_size=64, is_prefill=is_prefill, state_slots=state_slots
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("query_lens", BATCHES)
@pytest.mark.parametrize(
    ("dtype", "is_tiled"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_walked_tokens_are_those_of_torch(query_lens: tuple[int, ...], dtype: torch.dtype, is_tiled: bool) -> None:
    num_tokens, metadata = sum(query_lens), metadata_of(query_lens)
    x = random(num_tokens, 300 + 5, seed=1).to(dtype)[:, 3:-2]
    weight, conv_state = random(4, 300, seed=2).to(dtype), random(5, 3, 300, seed=3).to(dtype)
    qkv, gates = random(num_tokens, WIDTH, seed=1).to(dtype), random(num_tokens, 11, seed=2).to(dtype)[:, 3:]
    state = random(5, NUM_HEADS, KEY_DIM, VALUE_DIM, seed=5)
    others = conv_state.clone(), state.clone()
    expected = recurrent.causal_conv(x, weight, others[0], metadata)
    assert_close(exact_causal_conv(x, weight, conv_state, metadata), expected)
    assert torch.equal(conv_state, others[0])
    params = replace(PARAMS, is_tiled=is_tiled)
    expected = recurrent.gated_delta_rule(qkv, gates, params, others[1], metadata)
    assert_close(exact_delta_rule(qkv, gates, params, state, metadata), expected)
    assert_close(state, others[1])


def test_a_division_into_steps_changes_no_bit() -> None:
    x, weight, qkv, gates = random(6, 24), random(4, 24, seed=1), random(6, WIDTH, seed=2), random(6, 8, seed=3)
    parts = []
    for lengths in ((6,), (1, 3, 2)):
        conv_state, state, start = torch.zeros(5, 3, 24), torch.zeros(5, NUM_HEADS, KEY_DIM, VALUE_DIM), 0
        outputs: list[tuple[Tensor, Tensor]] = []
        for length in lengths:
            rows, metadata = slice(start, start + length), metadata_of((length,), (2,))
            mixed = exact_causal_conv(x[rows], weight, conv_state, metadata)
            outputs.append((mixed, exact_delta_rule(qkv[rows], gates[rows], PARAMS, state, metadata)))
            start += length
        parts.append([*(torch.cat(each) for each in zip(*outputs, strict=True)), conv_state, state])
    assert all(map(torch.equal, *parts))


def test_a_step_with_a_prompt_is_computed_in_tiles_and_decodes_with_their_drafts_walked() -> None:
    walked, tiled = (exact_causal_conv, exact_delta_rule), (recurrent.causal_conv, recurrent.gated_delta_rule)
    single, several = BATCHES
    for query_lens, is_prefill, (conv, rule) in (
        (single, False, walked),
        (several, False, walked),
        (several, True, tiled),
    ):
        num_tokens, metadata = sum(query_lens), metadata_of(query_lens, is_prefill=is_prefill)
        x, weight = random(num_tokens, 24), random(4, 24, seed=1)
        qkv, gates = random(num_tokens, WIDTH, seed=2), random(num_tokens, 8, seed=3)
        states = [(torch.ones(5, 3, 24), torch.ones(5, NUM_HEADS, KEY_DIM, VALUE_DIM)) for _ in range(2)]
        assert torch.equal(causal_conv(x, weight, states[0][0], metadata), conv(x, weight, states[1][0], metadata))
        ours = gated_delta_rule(qkv, gates, PARAMS, states[0][1], metadata)
        assert torch.equal(ours, rule(qkv, gates, PARAMS, states[1][1], metadata))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_are_those_of_torch(dtype: torch.dtype) -> None:
    x, gate, weight = random(5, 3, 21).to(dtype), random(5, 70, seed=1).to(dtype), random(21, seed=2).to(dtype)
    gate = gate[:, 7:].view(5, 3, 21)
    assert_close(gated_rms_norm(x, gate, weight, 0.01), recurrent.gated_rms_norm(x, gate, weight, 0.01))
    for columns in (63, 1):
        rows, gates = x.flatten(1), gate.flatten(1)[:, :columns]
        assert_close(mul_sigmoid(rows.clone(), gates), recurrent.mul_sigmoid(rows.clone(), gates))
