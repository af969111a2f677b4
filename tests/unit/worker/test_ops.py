"""Every backend computes what `Ops` promises, compared with plain torch in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.forward_context import AttentionMetadata
from services.worker.kv_cache import KvCache, KvCacheSpec
from services.worker.ops import BACKEND_NAMES, Ops, cpu_plan, load_ops
from tests.support.paged_model import attention_metadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown ops backend 'tpu', one of: cpu, reference"):
        load_ops("tpu")


@every_backend
def test_a_backend_says_what_its_numbers_depend_on(ops: Ops) -> None:
    assert ops.numerics().startswith(f"{ops.name} torch-{torch.__version__}")


@every_backend
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_multiplies_by_the_transposed_weight(ops: Ops, num_rows: int, has_bias: bool) -> None:
    x, weight, bias = random(num_rows, 24), random(40, 24, seed=1), random(40, seed=2) if has_bias else None
    kernel = ops.prepare_linear(weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(kernel(x), expected)


@every_backend
def test_linear_keeps_no_hold_on_the_weight(ops: Ops) -> None:
    weight = random(40, 24)
    kernel = ops.prepare_linear(weight, None)
    expected = kernel(random(2, 24, seed=1))
    weight.zero_()
    assert torch.equal(kernel(random(2, 24, seed=1)), expected)


def test_cpu_multiplies_without_torchs_private_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.ops.cpu_ops._HAS_PACKED_LINEAR", False)
    ops, x, weight, bias = load_ops("cpu"), random(5, 24), random(40, 24, seed=1), random(40, seed=2)
    assert_close(ops.prepare_linear(weight, bias)(x), F.linear(x.double(), weight.double(), bias.double()))
    assert "plain" in ops.numerics()


@every_backend
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops) -> None:
    x, weight = random(5, 24), random(24, seed=1)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    assert_close(ops.rms_norm(x, weight, 0.1), expected)


@every_backend
def test_add_rms_norm_writes_the_sum_into_the_residual(ops: Ops) -> None:
    x, residual, weight = random(5, 24), random(5, 24, seed=1), random(24, seed=2)
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, 0.1)
    assert torch.equal(residual, total)
    assert_close(normed, ops.rms_norm(total, weight, 0.1))


@every_backend
def test_silu_and_mul_gates_the_second_half(ops: Ops) -> None:
    x = random(5, 24)
    expected = F.silu(x[:, :12].double()) * x[:, 12:].double()
    assert_close(ops.silu_and_mul(x.clone()), expected)


@every_backend
def test_rope_rotates_pairs_half_a_head_apart_by_their_tokens_position(ops: Ops) -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    angles = torch.outer(torch.arange(50.0), frequencies)
    tables = ops.prepare_rope(angles.cos(), angles.sin())
    positions = torch.tensor([0, 7, 49, 7])
    # As the fused projection leaves them: with other columns behind each row.
    fused = random(4, NUM_HEADS + 3, HEAD_DIM)
    untouched = fused[:, NUM_HEADS:].clone()
    pairs = torch.complex(*fused[:, :NUM_HEADS].double().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones(4, 1, 4).double(), angles[positions].double().unsqueeze(1))
    ops.rope(fused[:, :NUM_HEADS], ops.select_rope(tables, positions))
    assert_close(fused[:, :NUM_HEADS], torch.cat((turned.real, turned.imag), dim=-1))
    assert torch.equal(fused[:, NUM_HEADS:], untouched)


@every_backend
def test_greedy_takes_the_lowest_of_equal_columns(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [-1.0, -1.0, -2.0, -1.0]])
    token_ids, largest = ops.greedy_sample(logits)
    assert (token_ids.tolist(), largest.tolist()) == ([1, 0], [5.0, -1.0])


@every_backend
def test_greedy_reports_nan_as_the_largest(ops: Ops) -> None:
    _, largest = ops.greedy_sample(torch.tensor([[0.0, math.nan, 9.0], [1.0, 2.0, 3.0]]))
    assert largest.isnan().tolist() == [True, False]


@dataclass(frozen=True)
class Batch:
    """Sequences of random length in random blocks, some of their tokens cached."""

    block_size: int
    num_cached: list[int]
    num_new: list[int]
    order: int

    @property
    def context_lens(self) -> list[int]:
        return [cached + new for cached, new in zip(self.num_cached, self.num_new, strict=True)]

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // self.block_size) for length in self.context_lens) + 2

    def metadata(self, *, is_prefill: bool = True) -> AttentionMetadata:
        # Block 0 stays out of every table: what pads a table must never be read as context.
        free = (1 + torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(self.order))).tolist()
        tables = [[free.pop() for _ in range(-(-length // self.block_size))] for length in self.context_lens]
        return attention_metadata(
            tables, self.num_new, self.context_lens, block_size=self.block_size, is_prefill=is_prefill
        )


def batches(*, max_new: int = 40, max_cached: int = 60, min_cached: int = 0) -> st.SearchStrategy[Batch]:
    return st.integers(1, 9).flatmap(
        lambda size: st.builds(
            Batch,
            block_size=st.sampled_from([1, 3, 16]),
            num_cached=st.lists(st.integers(min_cached, max_cached) | st.just(0), min_size=size, max_size=size),
            num_new=st.lists(st.integers(1, max_new), min_size=size, max_size=size),
            order=st.integers(0, 1000),
        )
    )


def run_attention(ops: Ops, metadata: AttentionMetadata, cache: KvCache, qkv: Tensor) -> Tensor:
    """One layer's write and attention, `qkv` [T, H + 2 K, D] as the fused projection leaves it."""
    query, key, value = qkv.tensor_split((NUM_HEADS, NUM_HEADS + NUM_KV_HEADS), dim=1)
    plan = ops.plan_attention(metadata, cache)
    key_cache, value_cache = cache.layers[0]
    ops.write_kv(key, value, key_cache, value_cache, plan)
    if metadata.is_prefill:
        return ops.prefill_attention(query, key, value, key_cache, value_cache, plan)
    return ops.decode_attention(query, key_cache, value_cache, plan)


def make_cache(batch: Batch, fill: float) -> KvCache:
    cache = KvCache(KvCacheSpec(1, NUM_KV_HEADS, HEAD_DIM, torch.float32), batch.num_blocks, batch.block_size)
    for tensor in cache.layers[0]:
        tensor.fill_(fill)
    return cache


def fill_context(batch: Batch, metadata: AttentionMetadata, cache: KvCache) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values for every cached token; returns each sequence's, [cached, K, D]."""
    contexts = []
    for index, cached in enumerate(batch.num_cached):
        table = metadata.block_tables[index]
        keys, values = (
            random(cached, NUM_KV_HEADS, HEAD_DIM, seed=index),
            random(cached, NUM_KV_HEADS, HEAD_DIM, seed=99),
        )
        for place in range(cached):
            block, offset = int(table[place // batch.block_size]), place % batch.block_size
            cache.layers[0][0][block, offset] = keys[place]
            cache.layers[0][1][block, offset] = values[place]
        contexts.append((keys, values))
    return contexts


def dense_attention(batch: Batch, contexts: list[tuple[Tensor, Tensor]], qkv: Tensor) -> Tensor:
    """The definition: softmax over what each token may see, one token and head at a time, in float64."""
    outputs = []
    start = 0
    for (keys, values), cached, new in zip(contexts, batch.num_cached, batch.num_new, strict=True):
        rows = qkv[start : start + new].double()
        all_keys = torch.cat((keys.double(), rows[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]))
        all_values = torch.cat((values.double(), rows[:, NUM_HEADS + NUM_KV_HEADS :]))
        for place in range(new):
            seen = cached + place + 1
            heads = []
            for head in range(NUM_HEADS):
                group = head // (NUM_HEADS // NUM_KV_HEADS)
                scores = all_keys[:seen, group] @ rows[place, head] / math.sqrt(HEAD_DIM)
                heads.append(scores.softmax(0) @ all_values[:seen, group])
            outputs.append(torch.cat(heads))
        start += new
    return torch.stack(outputs)


def check_attention(ops: Ops, batch: Batch, *, is_prefill: bool) -> None:
    metadata = batch.metadata(is_prefill=is_prefill)
    # NaN wherever no token lies: whatever reads it shows.
    cache = make_cache(batch, math.nan)
    contexts = fill_context(batch, metadata, cache)
    qkv = random(sum(batch.num_new), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, seed=batch.order)
    output = run_attention(ops, metadata, cache, qkv)
    assert output.is_contiguous()
    assert_close(output, dense_attention(batch, contexts, qkv))


@every_backend
@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_prefill_attends_to_cached_and_new_tokens_and_to_nothing_else(ops: Ops, batch: Batch) -> None:
    check_attention(ops, batch, is_prefill=True)


@every_backend
@given(batch=batches(max_new=1, max_cached=200) | batches(max_new=9, max_cached=200))
@settings(max_examples=60, deadline=None)
def test_decode_attends_to_the_whole_context_and_to_nothing_else(ops: Ops, batch: Batch) -> None:
    check_attention(ops, batch, is_prefill=False)


@given(batch=batches(min_cached=1))
@settings(max_examples=40, deadline=None)
def test_cpu_cuts_prefills_behind_a_prefix_without_changing_them(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "_MAX_MASKED_QUERIES", 7)
        check_attention(load_ops("cpu"), batch, is_prefill=True)


@given(batch=batches(max_cached=200))
@settings(max_examples=40, deadline=None)
def test_cpu_buckets_change_no_result(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "_FREE_PADDING", 0)
        patch.setattr(cpu_plan, "_FREE_PADDING_SHARE", 0.02)
        patch.setattr(cpu_plan, "_MAX_BUCKET_BYTES", 64 * 2 * NUM_KV_HEADS * HEAD_DIM * 4)
        check_attention(load_ops("cpu"), batch, is_prefill=True)


@every_backend
@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_slot_of_minus_one_is_skipped(ops: Ops, is_prefill: bool) -> None:
    batch = Batch(block_size=16, num_cached=[0, 0], num_new=[1, 1], order=1)
    metadata = batch.metadata(is_prefill=is_prefill)
    metadata.slot_mapping[1] = -1
    cache = make_cache(batch, 7.0)
    qkv = random(2, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    output = run_attention(ops, metadata, cache, qkv)
    written = (cache.layers[0][0].flatten(0, 1) != 7.0).any(-1).any(-1)
    assert written.nonzero().flatten().tolist() == [int(metadata.slot_mapping[0])]
    assert_close(output[0], dense_attention(Batch(16, [0], [1], 1), [(qkv[:0, 0:2], qkv[:0, 0:2])], qkv[:1])[0])


@every_backend
@pytest.mark.parametrize("is_prefill", [True, False])
def test_one_rows_nan_stays_its_own(ops: Ops, is_prefill: bool) -> None:
    batch = Batch(block_size=16, num_cached=[20, 33, 5], num_new=[1, 1, 1], order=2)
    metadata = batch.metadata(is_prefill=is_prefill)
    cache = make_cache(batch, 0.0)
    fill_context(batch, metadata, cache)
    qkv = random(3, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    expected = run_attention(ops, metadata, cache, qkv.clone())
    qkv[1] = math.nan
    output = run_attention(ops, metadata, cache, qkv)
    assert output[1].isnan().all()
    assert_close(output[[0, 2]], expected[[0, 2]])
