"""One launch computes what norm, rotation and cache write compute in several."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionPlan
from services.worker.ops import Ops, RopeRows, load_ops
from services.worker.ops.arguments import HeadNorms
from services.worker.ops.triton.norm_rope_write import norm_rope_write
from tests.support.kernels.attention_batches import random
from tests.support.kernels.paged_attention import FP8, FP8_SCALES
from tests.support.models.paged_model import attention_metadata

SLOTS = torch.tensor([5, -1, 2, 0, 11])
POSITIONS = torch.tensor([3, 49, 0, 7, 7])


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    is_interleaved: bool = False
    has_norms: bool = True

    def tables(self) -> RopeRows:
        cos, sin = random(50, self.rotary_dim // 2), random(50, self.rotary_dim // 2, seed=1)
        return RopeRows(cos, sin, POSITIONS, self.is_interleaved)

    def norms(self) -> HeadNorms | None:
        if not self.has_norms:
            return None
        return HeadNorms(random(self.head_dim, seed=2), random(self.head_dim, seed=3), 0.1)

    def qkv(self) -> Tensor:
        """Rows with a stride, as in a wider tensor."""
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return random(len(SLOTS), width + 8, seed=4)[:, :width]

    def cache(self) -> tuple[Tensor, Tensor]:
        shape = (4, 3, self.num_kv_heads, self.head_dim)
        return torch.full(shape, 7.0), torch.full(shape, 7.0)

    def compute_separately(self, ops: Ops, qkv: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
        """Write the cache and return the query."""
        heads, first_value = qkv.clone().view(len(SLOTS), -1, self.head_dim), self.num_heads + self.num_kv_heads
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads : first_value]
        if (norms := self.norms()) is not None:
            query.copy_(ops.rms_norm(query, norms.query, norms.eps))
            key.copy_(ops.rms_norm(key, norms.key, norms.eps))
        ops.rope(heads[:, :first_value], ops.select_rope(self.tables(), POSITIONS))
        ops.write_kv(key, heads[:, first_value:], cache, plan())
        return query


def plan() -> AttentionPlan:
    """A plan that stores the tokens in `SLOTS`."""
    metadata = attention_metadata([[0]], [len(SLOTS)], [len(SLOTS)], block_size=len(SLOTS), is_prefill=True)
    metadata.slot_mapping.copy_(SLOTS)
    return AttentionPlan(metadata)


CASES = (
    Case(4, 2, 16, 16),
    Case(3, 1, 80, 80),
    Case(3, 3, 80, 48, has_norms=False),
    Case(8, 1, 64, 32, is_interleaved=True),
    Case(9, 3, 128, 128, is_interleaved=True, has_norms=False),
    Case(16, 8, 128, 128),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_equals_norm_rope_and_write(case: Case) -> None:
    qkv, cache, expected_cache = case.qkv(), case.cache(), case.cache()
    untouched = qkv.clone()
    expected = case.compute_separately(load_ops("reference"), qkv, expected_cache)
    norm_rope_write(qkv, case.norms(), case.tables(), num_heads=case.num_heads, cache=cache, slot_mapping=SLOTS)
    width = case.num_heads * case.head_dim
    torch.testing.assert_close(qkv[:, :width], expected.flatten(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(qkv[:, width:], untouched[:, width:])
    torch.testing.assert_close(cache[0], expected_cache[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(cache[1], expected_cache[1])


def test_norms_in_float32_multiply_heads_in_bfloat16() -> None:
    case = CASES[0]
    qkv = case.qkv().bfloat16()
    cache, expected_cache = ([tensor.bfloat16() for tensor in case.cache()] for _ in range(2))
    expected = case.compute_separately(load_ops("reference"), qkv, tuple(expected_cache))
    norm_rope_write(qkv, case.norms(), case.tables(), num_heads=case.num_heads, cache=tuple(cache), slot_mapping=SLOTS)
    # The interpreter rounds to bfloat16 towards zero.
    torch.testing.assert_close(qkv[:, : case.num_heads * case.head_dim], expected.flatten(1), atol=0.03, rtol=0.03)
    torch.testing.assert_close(cache[0], expected_cache[0], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_a_cache_in_fp8_has_the_codes_of_what_a_plain_one_has(case: Case) -> None:
    cache, scales = case.cache(), FP8_SCALES
    coded = (*(tensor.to(FP8) for tensor in cache), *scales)
    queries = []
    for each in (cache, coded):
        qkv = case.qkv()
        norm_rope_write(qkv, case.norms(), case.tables(), num_heads=case.num_heads, cache=each, slot_mapping=SLOTS)
        queries.append(qkv)
    assert torch.equal(*queries)
    slots = SLOTS[SLOTS >= 0]
    for codes, plain, scale in zip(coded, cache, scales, strict=False):
        written = plain.flatten(0, 1)[slots] * scale.reciprocal()
        assert torch.equal(codes.float().flatten(0, 1)[slots], written.clamp(-448, 448).to(FP8).float())


def test_a_tokens_nan_stays_its_own() -> None:
    case = CASES[0]
    qkv, cache = case.qkv(), case.cache()
    qkv[2] = math.nan
    norm_rope_write(qkv, case.norms(), case.tables(), num_heads=case.num_heads, cache=cache, slot_mapping=SLOTS)
    assert qkv.isnan().any(-1).tolist() == [False, False, True, False, False]
    for tensor in cache:
        assert tensor.flatten(0, 1).flatten(1).isnan().any(-1).nonzero().flatten().tolist() == [int(SLOTS[2])]
