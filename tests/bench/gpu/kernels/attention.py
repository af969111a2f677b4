"""Ops of layers without weights: norms, activation, rotation, the KV cache and attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward.kv_cache import CacheTensor, attention_cache
from services.worker.ops import Activation, AttentionParams, HeadNorms
from tests.bench.gpu.kernels.sizes import Ground, Op, with_conch

_EPS = 1e-6
# Of DeepSeek-V3.2's indexer.
_INDEX_HEADS, _INDEX_WIDTH = 64, 128


def elementwise_ops(ground: Ground) -> Iterator[Op]:
    """Norms and the activation."""
    ops, sizes = ground.ops, ground.sizes
    x, residual, weight = (
        ground.random(*shape) for shape in (*[(sizes.num_tokens, sizes.hidden)] * 2, (sizes.hidden,))
    )
    name = f"{sizes.num_tokens} x {sizes.hidden}"
    norm = "normalization.rms_norm"
    yield Op(
        f"rms_norm {name}",
        lambda: ops.rms_norm(x, weight, _EPS),
        with_conch({"torch": lambda: F.rms_norm(x, (sizes.hidden,), weight, _EPS)}, norm, "rms_norm", x, weight, _EPS),
    )
    yield Op(
        f"add_rms_norm {name}",
        lambda: ops.add_rms_norm(x, residual, weight, _EPS),
        with_conch(
            {"torch": lambda: F.rms_norm(residual.add_(x), (sizes.hidden,), weight, _EPS)},
            norm,
            "fused_add_rms_norm",
            *(x, residual, weight, _EPS),
        ),
    )
    yield Op(
        f"layer_norm {name}",
        lambda: ops.layer_norm(x, weight, weight, _EPS),
        {"torch": lambda: F.layer_norm(x, (sizes.hidden,), weight, weight, _EPS)},
    )
    both = ground.random(sizes.num_tokens, 2 * sizes.inner)
    gate, up = both.chunk(2, dim=-1)
    yield Op(
        f"act_and_mul {sizes.num_tokens} x {sizes.inner}",
        lambda: ops.act_and_mul(both, Activation.SILU),
        with_conch({"torch": lambda: F.silu(gate) * up}, "activation.silu_and_mul", "silu_and_mul", both),
    )


def head_ops(ground: Ground) -> Iterator[Op]:
    """Rotation, and what writes keys and values."""
    ops, sizes = ground.ops, ground.sizes
    num_heads, num_kv, width = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    step = ground.paged(attention_cache(num_kv, width, ground.dtype), sizes.num_tokens, 16, 1)
    qkv = ground.random(sizes.num_tokens, num_heads + 2 * num_kv, width)
    query_key, key, value = qkv[:, :-num_kv], qkv[:, num_heads:-num_kv], qkv[:, -num_kv:]
    angles = ground.random(64, width // 2, dtype=torch.float32)
    positions = torch.full((sizes.num_tokens,), 15, dtype=torch.int64, device=ground.device)
    rows = ops.select_rope(ops.prepare_rope(angles.cos(), angles.sin(), is_interleaved=False), positions)
    cos, sin = (part[positions, None].to(ground.dtype) for part in (angles.cos(), angles.sin()))
    name = f"{sizes.num_tokens} x {num_heads} + {num_kv} heads"
    query_rows, key_rows = qkv[:, :num_heads].flatten(1).clone(), key.flatten(1).clone()
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(ground.dtype)
    yield Op(
        f"rope {name}",
        lambda: ops.rope(query_key, rows),
        with_conch(
            {"torch": lambda: _rotate(query_key, cos, sin)},
            "embedding.rotary_embedding",
            "rotary_embedding",
            *(positions, query_rows, key_rows, width, table),
        ),
    )
    slots = step.metadata.slot_mapping

    def index_put() -> None:
        for tensor, values in zip(step.layer, (key, value), strict=True):
            tensor.view(-1, num_kv, width)[slots] = values

    yield Op(
        f"write_kv {name}",
        lambda: ops.write_kv(key, value, step.layer, step.plan),
        with_conch({"torch": index_put}, "vllm.reshape_and_cache", "reshape_and_cache", key, value, *step.layer, slots),
    )
    weight = ground.random(width)
    norms = HeadNorms(weight, weight, _EPS)

    def composed() -> None:
        query_key.copy_(_rotate(F.rms_norm(query_key, (width,), weight, _EPS), cos, sin))
        index_put()

    yield Op(
        f"norm_rope_write {name}",
        lambda: ops.norm_rope_write(qkv, norms, rows, num_heads=num_heads, cache=step.layer, plan=step.plan),
        {"torch": composed},
    )


def attention_ops(ground: Ground) -> Iterator[Op]:
    """Attention over keys and values; torch's reads them from contiguous copies."""
    ops, sizes = ground.ops, ground.sizes
    width = sizes.head_dim
    params = AttentionParams(width**-0.5)
    cached = attention_cache(sizes.num_kv_heads, width, ground.dtype)
    num_seqs, context = sizes.decode
    step = ground.paged(cached, num_seqs, context, 1)
    query = ground.random(num_seqs, sizes.num_heads, width)
    keys, values = (step.contexts(tensor).transpose(1, 2).contiguous() for tensor in step.layer)
    meta = step.metadata
    yield Op(
        f"decode_attention {num_seqs} x {context}",
        lambda: ops.decode_attention(query, step.layer, step.plan, params),
        with_conch(
            {"torch": lambda: F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)},
            "attention.paged_attention",
            "paged_attention",
            *(query, *step.layer, meta.block_tables, meta.context_lens),
            scale=params.scale,
        ),
    )
    yield _prefill_attention(ground, params)


def _prefill_attention(ground: Ground, params: AttentionParams) -> Op:
    ops, sizes = ground.ops, ground.sizes
    width, num_kv = sizes.head_dim, sizes.num_kv_heads
    num_seqs, length = sizes.prefill
    step = ground.paged(attention_cache(num_kv, width, ground.dtype), num_seqs, length, length)
    query = ground.random(num_seqs * length, sizes.num_heads, width)
    key, value = (step.contexts(tensor).reshape(-1, num_kv, width) for tensor in step.layer)
    q, k, v = (each.view(num_seqs, length, -1, width).transpose(1, 2).contiguous() for each in (query, key, value))
    meta = step.metadata
    return Op(
        f"prefill_attention {num_seqs} x {length}",
        lambda: ops.prefill_attention(query, key, value, step.layer, step.plan, params),
        with_conch(
            {"torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)},
            "attention.varlen_attention",
            "varlen_attention",
            *(query, *step.layer, meta.cu_seqlens_q, length, meta.context_lens, length, meta.block_tables),
            causal=True,
            scale=params.scale,
        ),
    )


def latent_ops(ground: Ground) -> Iterator[Op]:
    """Attention over latents, and the choice of a context's tokens."""
    ops, sizes = ground.ops, ground.sizes
    latent, rope = sizes.latent
    num_seqs, context = sizes.latent_decode
    step = ground.paged((CacheTensor((latent + rope,), ground.dtype),), num_seqs, context, 1)
    (cache,) = step.layer
    query = ground.random(num_seqs, sizes.num_latent_heads, latent + rope)
    scale = (latent + rope) ** -0.5
    # All heads of a sequence are the queries of one head.
    keys = step.contexts(cache)[:, None].contiguous()
    values = keys[..., :latent].contiguous()
    yield Op(
        f"mla_attention {num_seqs} x {context}",
        lambda: ops.mla_attention(query, cache, step.plan, scale=scale, value_dim=latent),
        {"torch": lambda: F.scaled_dot_product_attention(query[:, None], keys, values, scale=scale)},
    )
    indexed = ground.paged((CacheTensor((_INDEX_WIDTH,), ground.dtype),), num_seqs, context, 1)
    index_query = ground.random(num_seqs, _INDEX_HEADS, _INDEX_WIDTH)
    weights = ground.random(num_seqs, _INDEX_HEADS, dtype=torch.float32)
    index_keys = indexed.contexts(indexed.layer[0]).contiguous()

    def composed() -> Tensor:
        scores = torch.einsum("shd,scd->shc", index_query, index_keys).relu().float()
        return torch.einsum("sh,shc->sc", weights, scores).topk(sizes.num_selected, dim=-1).indices

    yield Op(
        f"select_context {num_seqs} x {context}",
        lambda: ops.select_context(
            index_query, weights, indexed.layer[0], indexed.plan, num_selected=sizes.num_selected
        ),
        {"torch": composed},
    )


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
