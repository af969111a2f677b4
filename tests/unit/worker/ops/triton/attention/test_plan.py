"""A step's sequences, each by the kernel for its number of new tokens."""

from __future__ import annotations

import math

import pytest
import torch

from services.worker.ops import AttentionParams
from services.worker.ops.triton.attention.plan import TritonPlan
from services.worker.ops.triton.backend import TritonOps
from tests.support.kernels.attention_batches import Batch
from tests.support.kernels.paged_attention import PagedStep


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("new", [[1, 3, 9, 10, 1, 40], [1, 1], [30]])
def test_a_step_of_decodes_and_chunks_equals_the_reference_backend(new: list[int], is_prefill: bool) -> None:
    batch = Batch(16, [40, 70, 0, 20, 0, 0][: len(new)], new, 1)
    step = PagedStep(batch, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16)
    ops, metadata = TritonOps(), batch.metadata(is_prefill=is_prefill)
    plan, params = TritonPlan(metadata), AttentionParams(0.3)
    if is_prefill:
        key = value = torch.full((batch.num_tokens, 2, 16), math.nan)
        output = ops.prefill_attention(step.query, key, value, step.cache, plan, params)
    else:
        output = ops.decode_attention(step.query, step.cache, plan, params)
    assert output.is_contiguous()
    torch.testing.assert_close(output, step.expected(params), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("new", "is_prefill", "num_decodes", "num_chunks"),
    [
        ([1, 9, 1], False, 3, 0),
        ([1, 9, 10, 1], True, 2, 2),
        ([30, 1], True, 0, 2),
        ([4, 1], True, 2, 0),
    ],
)
def test_a_plan_divides_a_step_after_its_leading_decodes(
    new: list[int], is_prefill: bool, num_decodes: int, num_chunks: int
) -> None:
    metadata = Batch(4, [3] * len(new), new, 1).metadata(is_prefill=is_prefill)
    plan = TritonPlan(metadata)
    assert (0 if plan.decodes is None else plan.decodes.num_seqs) == num_decodes
    assert (0 if plan.chunks is None else plan.chunks.num_seqs) == num_chunks
    if plan.chunks is not None:
        assert plan.chunks.cu_seqlens_q[0] == sum(new[:num_decodes])
        assert plan.chunks.num_tokens == sum(new[num_decodes:])
