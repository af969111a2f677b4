"""Every op of the backend `aiter` that AITER computes, with sizes of published models, beside the reference backend.

The same checks run on an AMD GPU, and without one on stand-ins for AITER's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import CacheTensor, KvCache, KvCacheSpec, LayerCache, attention_cache
from services.worker.ops import Activation, AttentionParams, ExpertWeights, Ops, SwigluClamp, load_ops
from tests.support.kernels.attention_batches import Batch, random

BF16 = torch.bfloat16
# Relative to the largest value, for what bfloat16 rounds a few times.
TOLERANCE = 0.02

_HIDDEN, _INNER = 1024, 1536
_HEADS, _KV_HEADS, _WIDTH = 16, 4, 128
_BLOCK_SIZE = 16


class Bench:
    """A backend on its device, and the reference on the CPU in float32, given the same values of bfloat16."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self.ops = ops
        self.reference = load_ops("reference")
        self.device = device

    def both(self, compute: Callable[[Ops, Callable[[Tensor], Tensor], torch.dtype], Tensor]) -> float:
        """The largest difference of what `compute(ops, place, dtype)` returns, in parts of the largest value.

        `place` puts a float32 tensor with values of bfloat16 where the backend computes; it copies it.
        """
        ours = compute(self.ops, lambda x: x.to(self.device, BF16 if x.is_floating_point() else x.dtype), BF16)
        expected = compute(self.reference, torch.clone, torch.float32)
        difference = (ours.cpu().float() - expected).abs().max() / expected.abs().max()
        return float(difference.nan_to_num(torch.inf))


Check = Callable[[Bench], float]


def values(*shape: int, seed: int = 0) -> Tensor:
    """Random values of bfloat16, in float32."""
    return random(*shape, seed=seed).to(BF16).float()


def rms_norm(bench: Bench) -> float:
    x, weight = values(33, _HIDDEN), values(_HIDDEN, seed=1)
    return bench.both(lambda ops, place, _: ops.rms_norm(place(x), place(weight), 1e-6))


def rms_norm_of_heads(bench: Bench) -> float:
    x, weight = values(33, _HEADS + 2, _WIDTH), values(_WIDTH, seed=1)
    return bench.both(lambda ops, place, _: ops.rms_norm(place(x)[:, :_HEADS], place(weight), 1e-6))


def add_rms_norm(bench: Bench) -> float:
    """The result and the sum."""
    x, residual, weight = values(33, _HIDDEN), values(33, _HIDDEN, seed=1), values(_HIDDEN, seed=2)

    def compute(ops: Ops, place: Callable[[Tensor], Tensor], _: torch.dtype) -> Tensor:
        total = place(residual)
        return torch.cat((ops.add_rms_norm(place(x), total, place(weight), 1e-6), total))

    return bench.both(compute)


def rms_norm_with_weight_in_float32(bench: Bench) -> float:
    """Alone, and after an addition."""
    x, residual, weight = values(33, _HIDDEN), values(33, _HIDDEN, seed=1), random(_HIDDEN, seed=2)

    def compute(ops: Ops, place: Callable[[Tensor], Tensor], _: torch.dtype) -> Tensor:
        total, factor = place(residual), weight.to(place(residual).device)
        alone = ops.rms_norm(place(x), factor, 1e-6)
        return torch.cat((alone, ops.add_rms_norm(place(x), total, factor, 1e-6), total))

    return bench.both(compute)


def _act_and_mul(bench: Bench, activation: Activation) -> float:
    x = values(33, 2 * _INNER)
    return bench.both(lambda ops, place, _: ops.act_and_mul(place(x), activation))


def silu_and_mul(bench: Bench) -> float:
    return _act_and_mul(bench, Activation.SILU)


def gelu_tanh_and_mul(bench: Bench) -> float:
    return _act_and_mul(bench, Activation.GELU_TANH)


def linear(bench: Bench) -> float:
    x, weight, bias = values(33, _HIDDEN), values(_INNER, _HIDDEN, seed=1), values(_INNER, seed=2)
    return bench.both(lambda ops, place, dtype: ops.prepare_linear(place(weight), place(bias), dtype)(place(x)))


def per_head_linear(bench: Bench) -> float:
    x, weight = values(33, _HEADS, _WIDTH), values(_HEADS, 64, _WIDTH, seed=1)
    return bench.both(lambda ops, place, _: ops.prepare_per_head_linear(place(weight))(place(x)))


def _rope(bench: Bench, *, is_interleaved: bool) -> float:
    heads, angles = values(33, _HEADS + 2 * _KV_HEADS, _WIDTH), random(40, 32)
    positions = torch.arange(33) + 5

    def compute(ops: Ops, place: Callable[[Tensor], Tensor], _: torch.dtype) -> Tensor:
        qkv = place(heads)
        tables = ops.prepare_rope(
            angles.cos().to(qkv.device), angles.sin().to(qkv.device), is_interleaved=is_interleaved
        )
        ops.rope(qkv[:, : _HEADS + _KV_HEADS], ops.select_rope(tables, place(positions)))
        return qkv

    return bench.both(compute)


def rope(bench: Bench) -> float:
    """Only half of the columns are rotated."""
    return _rope(bench, is_interleaved=False)


def rope_of_neighbours(bench: Bench) -> float:
    return _rope(bench, is_interleaved=True)


@dataclass(frozen=True)
class Attention:
    """A step over a cache that earlier steps have filled."""

    num_cached: tuple[int, ...]
    num_new: tuple[int, ...]
    window: int | None = None
    has_sinks: bool = False
    is_prefill: bool | None = None
    """None means that several new tokens are of a prompt."""

    def __call__(self, bench: Bench) -> float:
        batch = Batch(_BLOCK_SIZE, list(self.num_cached), list(self.num_new), 1)
        is_prefill = max(self.num_new) > 1 if self.is_prefill is None else self.is_prefill
        heads = values(batch.num_tokens, _HEADS + 2 * _KV_HEADS, _WIDTH, seed=3)
        contexts = [batch.contexts(_KV_HEADS, _WIDTH, seed=seed) for seed in (4, 5)]
        sinks = random(_HEADS, seed=6) if self.has_sinks else None

        def compute(ops: Ops, place: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
            qkv = place(heads)
            cache, plan = _begin(ops, batch, attention_cache(_KV_HEADS, _WIDTH, dtype), qkv.device, is_prefill)
            _write_cached(ops, batch, cache, plan, [place(_cached(batch, rows)) for rows in contexts])
            query, key, value = torch.split(qkv, [_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
            ops.write_kv(key, value, cache, plan)
            on_device = None if sinks is None else sinks.to(qkv.device)
            params = AttentionParams(_WIDTH**-0.5, window=self.window, sinks=on_device)
            if is_prefill:
                return ops.prefill_attention(query, key, value, cache, plan, params)
            return ops.decode_attention(query, cache, plan, params)

        return bench.both(compute)


def latent_attention(bench: Bench) -> float:
    """A decode with the sizes of DeepSeek-V3 on eight ranks."""
    return _latent_attention(bench, num_heads=16, num_cached=(40, 3, 200), num_new=(1, 1, 1))


def latent_attention_of_all_heads(bench: Bench) -> float:
    """A decode with the sizes of DeepSeek-V3 on data-parallel ranks."""
    return _latent_attention(bench, num_heads=128, num_cached=(70,), num_new=(1,))


def latent_attention_with_drafts(bench: Bench) -> float:
    return _latent_attention(bench, num_heads=16, num_cached=(40, 3, 20), num_new=(1, 3, 1))


def _latent_attention(bench: Bench, *, num_heads: int, num_cached: tuple[int, ...], num_new: tuple[int, ...]) -> float:
    batch = Batch(_BLOCK_SIZE, list(num_cached), list(num_new), 1)
    query, latents = values(batch.num_tokens, num_heads, 576), batch.contexts(576, seed=1)

    def compute(ops: Ops, place: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        layer = (CacheTensor((576,), dtype),)
        (cache,), plan = _begin(ops, batch, layer, place(query).device, False)
        filled = cache.cpu()
        batch.fill_cached(batch.metadata(), filled, [each.to(BF16).to(dtype) for each in latents])
        cache.copy_(filled)
        ops.write_cache(place(batch.new_rows(latents).to(BF16).float()), cache, plan)
        return ops.mla_attention(place(query), cache, plan, scale=576**-0.5, value_dim=512)

    return bench.both(compute)


def _experts(bench: Bench, *, clamp: SwigluClamp | None, num_elsewhere: int = 0) -> float:
    num_experts, hidden, inner = 8, 256, 128
    x, scores = values(33, hidden), random(33, num_experts + num_elsewhere, seed=1)
    chosen = scores.topk(2, dim=1)
    expert_ids = chosen.indices.clamp(max=num_experts).int()
    weights = chosen.values.softmax(dim=1)

    def compute(ops: Ops, place: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        experts = [
            ExpertWeights(
                place(values(2 * inner, hidden, seed=number)),
                place(values(hidden, inner, seed=50 + number)),
                None if clamp is None else place(values(2 * inner, seed=100 + number)),
                None if clamp is None else place(values(hidden, seed=150 + number)),
            )
            for number in range(num_experts)
        ]
        rows = place(x)
        return ops.prepare_experts(experts, clamp, dtype)(rows, expert_ids.to(rows.device), weights.to(rows.device))

    return bench.both(compute)


def fused_experts(bench: Bench) -> float:
    return _experts(bench, clamp=None)


def fused_experts_of_a_rank(bench: Bench) -> float:
    """Half of the experts are on another rank."""
    return _experts(bench, clamp=None, num_elsewhere=8)


def grouped_experts(bench: Bench) -> float:
    """With biases and the activation of gpt-oss."""
    return _experts(bench, clamp=SwigluClamp(1.702, 7.0))


def grouped_experts_of_a_rank(bench: Bench) -> float:
    """Half of the experts are on another rank."""
    return _experts(bench, clamp=SwigluClamp(1.702, 7.0), num_elsewhere=8)


CHECKS: dict[str, Check] = {
    "rms_norm": rms_norm,
    "rms_norm of heads": rms_norm_of_heads,
    "add_rms_norm": add_rms_norm,
    "rms_norm_with_weight_in_float32": rms_norm_with_weight_in_float32,
    "silu_and_mul": silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "linear": linear,
    "linear per head": per_head_linear,
    "rope": rope,
    "rope of neighbours": rope_of_neighbours,
    "attention: prompts": Attention((0, 0), (300, 1)),
    "attention: prefix and chunk": Attention((64, 100), (5, 40)),
    "attention: decodes": Attention((15, 16, 300), (1, 1, 1)),
    "attention: drafts": Attention((15, 16, 300), (1, 4, 1), is_prefill=False),
    "attention: a long context": Attention((2000,), (1,)),
    "attention: window and sinks": Attention((64, 0), (1, 90), window=17, has_sinks=True),
    "attention: latents": latent_attention,
    "attention: latents of all heads": latent_attention_of_all_heads,
    "attention: latents, drafts": latent_attention_with_drafts,
    "experts, fused": fused_experts,
    "experts of a rank, fused": fused_experts_of_a_rank,
    "experts, grouped": grouped_experts,
    "experts of a rank, grouped": grouped_experts_of_a_rank,
}


def _cached(batch: Batch, contexts: Sequence[Tensor]) -> Tensor:
    """The rows of `contexts` that earlier steps have computed, with values of bfloat16."""
    rows = [context[:cached] for context, cached in zip(contexts, batch.num_cached, strict=True)]
    return torch.cat(rows).to(BF16).float()


def _write_cached(
    ops: Ops, batch: Batch, cache: tuple[Tensor, ...], plan: AttentionPlan, rows: Sequence[Tensor]
) -> None:
    """Write keys and values of the tokens that earlier steps have computed, as those would."""
    metadata, slots = batch.metadata(), []
    for table, cached in zip(metadata.block_tables.long(), batch.num_cached, strict=True):
        places = torch.arange(cached)
        slots.append(table[places // _BLOCK_SIZE] * _BLOCK_SIZE + places % _BLOCK_SIZE)
    step = copy(plan)
    step.metadata = replace(plan.metadata, slot_mapping=torch.cat(slots).to(cache[0].device))
    key, value = rows
    ops.write_kv(key, value, cache, step)


def _begin(
    ops: Ops, batch: Batch, layer: LayerCache, device: torch.device, is_prefill: bool
) -> tuple[tuple[Tensor, ...], AttentionPlan]:
    """An empty cache, and the step's plan."""
    cache = KvCache(KvCacheSpec((layer,)), batch.num_blocks, batch.block_size, device)
    metadata = batch.metadata(is_prefill=is_prefill)
    on_device = AttentionMetadata(
        is_prefill=is_prefill,
        slot_mapping=metadata.slot_mapping.to(device),
        block_tables=metadata.block_tables.to(device),
        context_lens=metadata.context_lens.to(device),
        cu_seqlens_q=metadata.cu_seqlens_q.to(device),
        query_lens=metadata.query_lens,
        context_lens_host=metadata.context_lens_host,
        max_query_len=metadata.max_query_len,
        max_context_len=metadata.max_context_len,
    )
    return cache.layers[0], ops.plan_attention(on_device, cache)
