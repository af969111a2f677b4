"""Every backend's attention compared with its definition in float64: any blocks, chunks, windows, sinks and drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.kv_cache import CacheTensor, KvCache, LayerCache, attention_cache
from services.worker.ops import BACKEND_NAMES, AttentionParams, Ops, load_ops
from services.worker.ops.cpu import plan as cpu_plan
from tests.support.kernels.attention_batches import Batch, attend, batches, random

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
LAYER = attention_cache(NUM_KV_HEADS, HEAD_DIM, torch.float32)
PLAIN = AttentionParams(HEAD_DIM**-0.5)
SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0])

every_backend = pytest.mark.parametrize("ops", [load_ops(name) for name in BACKEND_NAMES], ids=BACKEND_NAMES)
every_kind = pytest.mark.parametrize("is_prefill", [True, False])

all_params = st.builds(
    AttentionParams,
    scale=st.sampled_from([HEAD_DIM**-0.5, 0.7]),
    window=st.none() | st.integers(1, 90),
    sinks=st.sampled_from([None, SINKS]),
)


@dataclass(frozen=True)
class Heads:
    """Query [T, H, D], key [T, K, D] and value [T, K, V] of a step's tokens."""

    query: Tensor
    key: Tensor
    value: Tensor

    def rows(self, rows: slice) -> Heads:
        """The heads of some of the tokens."""
        return Heads(self.query[rows], self.key[rows], self.value[rows])


class Step:
    """A batch with random heads, laid out side by side as the fused projection leaves them."""

    def __init__(self, batch: Batch, *, is_prefill: bool, layer: LayerCache = LAYER, fill: float = math.nan) -> None:
        keys, values = (
            [context.to(tensor.dtype) for context in batch.contexts(*tensor.shape, seed=seed)]
            for seed, tensor in enumerate(layer)
        )
        self.batch, self.keys, self.values = batch, keys, values
        self.metadata = batch.metadata(is_prefill=is_prefill)
        self.cache = batch.make_cache(layer, fill=fill)
        for tensor, contexts in zip(self.cache.layers[0], (keys, values), strict=True):
            batch.fill_cached(self.metadata, tensor, contexts)
        sizes = [NUM_HEADS * layer[0].shape[1], math.prod(layer[0].shape), math.prod(layer[1].shape)]
        new = torch.cat((batch.new_rows(keys).flatten(1), batch.new_rows(values).flatten(1)), dim=1)
        fused = torch.cat((random(batch.num_tokens, sizes[0], seed=batch.order).to(new.dtype), new), dim=1)
        query, key, value = torch.split(fused, sizes, dim=1)
        self.heads = Heads(
            query.view(-1, NUM_HEADS, layer[0].shape[1]), key.view(-1, *layer[0].shape), value.view(-1, *layer[1].shape)
        )

    def run(self, ops: Ops, params: AttentionParams) -> Tensor:
        """One layer's write and attention."""
        return run_attention(ops, self.heads, self.metadata, self.cache, params)

    def expected(self, params: AttentionParams) -> Tensor:
        """The result by definition."""
        return self.batch.attend_each(
            lambda seq, row, position: attend(
                self.heads.query[row], self.keys[seq][: position + 1], self.values[seq][: position + 1], params
            )
        )


def run_attention(
    ops: Ops, heads: Heads, metadata: AttentionMetadata, cache: KvCache, params: AttentionParams
) -> Tensor:
    plan = ops.plan_attention(metadata, cache)
    ops.write_kv(heads.key, heads.value, cache.layers[0], plan)
    if metadata.is_prefill:
        return ops.prefill_attention(heads.query, heads.key, heads.value, cache.layers[0], plan, params)
    return ops.decode_attention(heads.query, cache.layers[0], plan, params)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


def check_attention(ops: Ops, batch: Batch, params: AttentionParams, *, is_prefill: bool) -> None:
    step = Step(batch, is_prefill=is_prefill)
    output = step.run(ops, params)
    assert output.is_contiguous()
    assert_close(output, step.expected(params))


@every_backend
@given(batch=batches(), params=all_params)
@settings(max_examples=60)
def test_prefill_attends_to_cached_and_new_tokens_only(ops: Ops, batch: Batch, params: AttentionParams) -> None:
    check_attention(ops, batch, params, is_prefill=True)


@every_backend
@given(batch=batches(max_new=1, max_cached=200) | batches(max_new=9, max_cached=200), params=all_params)
@settings(max_examples=80)
def test_decode_attends_to_the_whole_context_only(ops: Ops, batch: Batch, params: AttentionParams) -> None:
    check_attention(ops, batch, params, is_prefill=False)


@given(batch=batches(min_cached=1), params=all_params)
@settings(max_examples=40)
def test_cpu_may_split_prefills_with_a_prefix(batch: Batch, params: AttentionParams) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "_MAX_MASKED_QUERIES", 7)
        check_attention(load_ops("cpu"), batch, params, is_prefill=True)


@given(batch=batches(max_cached=200), params=all_params)
@settings(max_examples=40)
def test_cpu_results_do_not_depend_on_buckets(batch: Batch, params: AttentionParams) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "_FREE_PADDING", 0)
        patch.setattr(cpu_plan, "_FREE_PADDING_SHARE", 0.02)
        patch.setattr(cpu_plan, "_MAX_BUCKET_BYTES", 64 * 2 * NUM_KV_HEADS * HEAD_DIM * 4)
        check_attention(load_ops("cpu"), batch, params, is_prefill=True)


@given(batch=batches(max_new=120), params=all_params)
@settings(max_examples=40)
def test_cpu_may_split_prefills_longer_than_their_window(batch: Batch, params: AttentionParams) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "_MIN_WINDOWED_QUERIES", 5)
        check_attention(load_ops("cpu"), batch, replace(params, window=params.window or 3), is_prefill=True)


@given(batch=batches(max_new=20), is_prefill=st.booleans())
@settings(max_examples=30)
def test_cpu_adds_sinks_without_torchs_private_kernel(batch: Batch, is_prefill: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.worker.ops.cpu.attention._HAS_FLASH", False)
        check_attention(load_ops("cpu"), batch, replace(PLAIN, sinks=SINKS), is_prefill=is_prefill)


@every_backend
@every_kind
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_values_may_be_narrower_than_keys(ops: Ops, is_prefill: bool, sinks: Tensor | None) -> None:
    layer = LAYER[0], CacheTensor((NUM_KV_HEADS, HEAD_DIM - 3), torch.float32)
    step = Step(Batch(16, [0, 20, 3, 0], [1, 5, 30, 9], 1), is_prefill=is_prefill, layer=layer)
    params = AttentionParams(0.5, window=12, sinks=sinks)
    output = step.run(ops, params)
    assert output.shape == (45, NUM_HEADS * (HEAD_DIM - 3))
    assert_close(output, step.expected(params))


@every_backend
def test_a_window_hides_the_tokens_before_it(ops: Ops) -> None:
    step = Step(Batch(4, [30], [3], 1), is_prefill=False)
    # Three tokens with a window of 5 see positions 26 to 32.
    for tensor in step.cache.layers[0]:
        for position in range(26):
            block = int(step.metadata.block_tables[0, position // 4])
            tensor[block, position % 4] = math.nan
    assert step.run(ops, replace(PLAIN, window=5)).isfinite().all()
    assert step.run(ops, replace(PLAIN, window=6)).isnan().any()


@every_backend
@every_kind
def test_a_slot_of_minus_one_is_skipped(ops: Ops, is_prefill: bool) -> None:
    step = Step(Batch(16, [0, 0], [1, 1], 1), is_prefill=is_prefill, fill=7.0)
    step.metadata.slot_mapping[1] = -1
    output = step.run(ops, PLAIN)
    written = (step.cache.layers[0][0].flatten(0, 1) != 7.0).any(-1).any(-1)
    assert written.nonzero().flatten().tolist() == [int(step.metadata.slot_mapping[0])]
    assert_close(output[0], step.expected(PLAIN)[0])


@every_backend
@every_kind
@pytest.mark.parametrize("params", [PLAIN, AttentionParams(1.0, window=8, sinks=SINKS)])
def test_a_nan_in_one_row_does_not_spread(ops: Ops, is_prefill: bool, params: AttentionParams) -> None:
    step = Step(Batch(16, [20, 33, 5], [1, 1, 1], 2), is_prefill=is_prefill)
    expected = step.expected(params)
    for tensor in (step.heads.query, step.heads.key, step.heads.value):
        tensor[1] = math.nan
    output = step.run(ops, params)
    assert output[1].isnan().all()
    assert_close(output[[0, 2]], expected[[0, 2]])


@given(batch=batches(max_new=9), params=all_params, chunk=st.integers(1, 9))
@settings(max_examples=30)
def test_reference_gives_a_token_the_same_bits_in_any_batch_chunk_and_block(
    batch: Batch, params: AttentionParams, chunk: int
) -> None:
    ops = load_ops("reference")
    step = Step(batch, is_prefill=True)
    together = step.run(ops, params)
    start = 0
    for seq, (cached, new) in enumerate(zip(batch.num_cached, batch.num_new, strict=True)):
        # Alone, in blocks of another size, a few tokens at a time.
        rows = slice(start, start + min(chunk, new))
        alone = Batch(5, [cached], [rows.stop - rows.start], order=3)
        metadata = alone.metadata(is_prefill=False)
        cache = alone.make_cache(LAYER)
        for tensor, contexts in zip(cache.layers[0], (step.keys, step.values), strict=True):
            alone.fill_cached(metadata, tensor, [contexts[seq]])
        assert torch.equal(run_attention(ops, step.heads.rows(rows), metadata, cache, params), together[rows])
        start += new


@every_backend
@every_kind
@pytest.mark.parametrize("params", [PLAIN, AttentionParams(0.5, window=8, sinks=SINKS)])
def test_bfloat16_is_attended_to_in_bfloat16(ops: Ops, is_prefill: bool, params: AttentionParams) -> None:
    layer = attention_cache(NUM_KV_HEADS, HEAD_DIM, torch.bfloat16)
    step = Step(Batch(16, [20, 33, 5, 0], [1, 7, 20, 30], 2), is_prefill=is_prefill, layer=layer)
    output = step.run(ops, params)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), step.expected(params), atol=0.05, rtol=0.05)


@every_backend
def test_a_norm_of_heads_reads_them_where_the_fused_projection_left_them(ops: Ops) -> None:
    fused, weight = random(5, NUM_HEADS + 3, HEAD_DIM), random(HEAD_DIM, seed=1)
    heads = fused[:, :NUM_HEADS]
    normed = ops.rms_norm(heads, weight, 0.1)
    assert normed.shape == heads.shape
    assert_close(normed.flatten(0, 1), ops.rms_norm(heads.reshape(-1, HEAD_DIM), weight, 0.1))


@every_kind
def test_the_reference_backend_attends_to_codes_of_fp8_times_their_scale(is_prefill: bool) -> None:
    ops, batch = load_ops("reference"), Batch(3, [0, 0], [9, 4], 1)
    step = Step(batch, is_prefill=is_prefill)
    scales = (torch.tensor([0.3]), torch.tensor([1.7]))
    codes = batch.make_cache(attention_cache(NUM_KV_HEADS, HEAD_DIM, torch.float8_e4m3fn)).layers[0]
    cache, plan = (*codes, *scales), ops.plan_attention(step.metadata, step.cache)
    ops.write_kv(step.heads.key, step.heads.value, cache, plan)
    output = ops.decode_attention(step.heads.query, cache, plan, PLAIN)
    for contexts, scale in zip((step.keys, step.values), scales, strict=True):
        contexts[:] = [(context / scale).to(torch.float8_e4m3fn).float() * scale for context in contexts]
    assert_close(output, step.expected(PLAIN))
