"""Configuration and loading of multi-head latent attention; see `layers.mla`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.worker.forward.kv_cache import CacheTensor, LayerCache
from services.worker.layers.indexer import Indexer, IndexerProjections
from services.worker.layers.linear import Linear, sum_over_ranks
from services.worker.layers.mla import LatentAttention, LatentProjections, LatentSizes
from services.worker.layers.norm import LayerNorm, RmsNorm
from services.worker.layers.rotary import Rotary
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig
from services.worker.weights.model_weights import ModelWeights
from shared.model_files.model_dir import ModelDirectoryError

# The epsilon of the norms inside the attention; config.json's `rms_norm_eps` is that of the other norms.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """The indexers of a model: their sizes, and which layers have one."""

    num_heads: int
    head_dim: int
    num_selected: int
    """The most tokens that a token attends to."""
    is_interleaved: bool = False
    """Whether its rotated pairs are adjacent columns in checkpoints; otherwise they are rope_dim / 2 apart."""
    shared_layers: frozenset[int] = frozenset()
    """Layers without an indexer, which attend to what the last layer with one selected."""
    is_shared_by_drafts: bool = False
    """Whether a prediction layer selects for the first draft only, and the later ones attend to the same."""

    def is_in(self, layer: int) -> bool:
        """Whether a layer has an indexer of its own."""
        return layer not in self.shared_layers


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """A family's attention, the same in every layer but for the indexers."""

    sizes: LatentSizes
    has_bias: bool
    scale: float
    """Multiplies the products of queries and keys."""
    is_interleaved: bool
    """Whether rotated pairs are adjacent columns; otherwise they are rope_dim / 2 apart."""
    indexer: IndexerConfig | None = None
    """None means dense attention."""

    @classmethod
    def from_json(
        cls,
        values: ConfigValues,
        config: DecoderConfig,
        *,
        has_rope_choice: bool = False,
        indexer: IndexerConfig | None = None,
    ) -> LatentAttentionConfig:
        """Read the sizes; `has_rope_choice` is whether the family's pairs may be apart, which others refuse."""
        if not has_rope_choice:
            values.only("rope_interleave", True)
        # Latents have no key heads of their own: transformers repeats them too often, and fails.
        values.only("num_key_value_heads", values.size("num_attention_heads"))
        sizes = LatentSizes(
            num_heads=values.size("num_attention_heads"),
            plain_dim=values.size("qk_nope_head_dim"),
            rope_dim=values.size("qk_rope_head_dim"),
            value_dim=values.size("v_head_dim"),
            latent_dim=values.size("kv_lora_rank"),
            query_latent_dim=values.optional_size("q_lora_rank"),
        )
        if sizes.rope_dim % 2:
            raise ModelDirectoryError(f"config.json: qk_rope_head_dim {sizes.rope_dim} is odd")
        if indexer is not None:
            _check_indexer(indexer, sizes)
        return cls(
            sizes=sizes,
            has_bias=values.flag("attention_bias", default=False),
            scale=sizes.head_dim**-0.5 * config.rope.score_factor,
            is_interleaved=values.flag("rope_interleave", default=True),
            indexer=indexer,
        )

    def indexer_of(self, layer: int) -> IndexerConfig | None:
        """The indexer that a layer has; None if it has none."""
        return self.indexer if self.indexer is not None and self.indexer.is_in(layer) else None

    def layer_cache(self, layer: int, dtype: torch.dtype) -> LayerCache:
        """What a token keeps in a layer."""
        latent, indexer = CacheTensor((self.sizes.cached_dim,), dtype), self.indexer_of(layer)
        return (latent,) if indexer is None else (latent, CacheTensor((indexer.head_dim,), dtype))


def load_latent_attention(
    shard: Shard, config: DecoderConfig, layer: int, *, attention: LatentAttentionConfig
) -> LatentAttention:
    """Load this rank's heads of a layer, and the projections to the latents in full."""
    prefix, heads, sizes = f"model.layers.{layer}.self_attn", shard.heads(attention.sizes.num_heads), attention.sizes
    indexer = attention.indexer_of(layer)
    return LatentAttention(
        shard.ops,
        layer,
        replace(sizes, num_heads=len(heads)),
        _load_projections(shard, config, prefix, attention, heads),
        scale=attention.scale,
        indexer=None if indexer is None else _load_indexer(shard, config, prefix, attention, indexer),
    )


def load_latent_rotary(shard: Shard, config: DecoderConfig, attention: LatentAttentionConfig) -> Rotary:
    """The rotation of the attention's heads and of the indexer's heads."""
    return Rotary(
        shard.ops,
        config.rope,
        attention.sizes.rope_dim,
        config.context_length,
        is_interleaved=attention.is_interleaved,
        device=shard.weights.device,
    )


def _check_indexer(indexer: IndexerConfig, sizes: LatentSizes) -> None:
    if sizes.query_latent_dim is None:
        raise ModelDirectoryError("config.json: q_lora_rank is missing, but the indexer needs it")
    if indexer.head_dim < sizes.rope_dim:
        raise ModelDirectoryError(
            f"config.json: index_head_dim {indexer.head_dim} is less than qk_rope_head_dim {sizes.rope_dim}"
        )


def _load_projections(
    shard: Shard, config: DecoderConfig, prefix: str, attention: LatentAttentionConfig, heads: Part
) -> LatentProjections:
    sizes, has_bias, hidden = attention.sizes, attention.has_bias, Part.whole(config.hidden_size)
    down_names, down_sizes = [f"{prefix}.kv_a_proj_with_mqa"], [Part.whole(sizes.cached_dim)]
    query_name, query_in, query_norm = f"{prefix}.q_proj", hidden, None
    if sizes.query_latent_dim is not None:
        query_name, query_in = f"{prefix}.q_b_proj", Part.whole(sizes.query_latent_dim)
        down_names, down_sizes = [f"{prefix}.q_a_proj", *down_names], [query_in, *down_sizes]
        query_norm = _load_norm(shard, f"{prefix}.q_a_layernorm", sizes.query_latent_dim)
    output_in = heads.times(sizes.value_dim)
    output = Linear.load(shard, [f"{prefix}.o_proj"], [hidden], inputs=output_in, has_bias=has_bias)
    absorb, expand = _absorbed_weights(shard.weights, f"{prefix}.kv_b_proj", sizes, heads)
    return LatentProjections(
        down=Linear.load(shard, down_names, down_sizes, inputs=hidden, has_bias=has_bias),
        query_norm=query_norm,
        query=Linear.load(shard, [query_name], [heads.times(sizes.head_dim)], inputs=query_in),
        latent_norm=_load_norm(shard, f"{prefix}.kv_a_layernorm", sizes.latent_dim),
        absorb=shard.ops.prepare_per_head_linear(absorb),
        expand=shard.ops.prepare_per_head_linear(expand),
        output=sum_over_ranks(output, shard.tp),
    )


def _absorbed_weights(weights: ModelWeights, name: str, sizes: LatentSizes, heads: Part) -> tuple[Tensor, Tensor]:
    """W_UK transposed, [H, latent_dim, plain_dim], and W_UV, [H, value_dim, latent_dim], both views of one matrix."""
    num_rows = sizes.plain_dim + sizes.value_dim
    rows = heads.times(num_rows)
    up = weights.dense(name, (rows.total, sizes.latent_dim), rows=rows.run).view(len(heads), num_rows, -1)
    return up[:, : sizes.plain_dim].transpose(1, 2), up[:, sizes.plain_dim :]


def _load_indexer(
    shard: Shard, config: DecoderConfig, prefix: str, attention: LatentAttentionConfig, indexer: IndexerConfig
) -> Indexer:
    """Load an indexer in full on every rank, its columns in the order that the attention's rotation expects.

    In DeepSeek's checkpoints its rotated pairs are rope_dim / 2 columns apart although the attention's are adjacent.
    Reordering queries and keys alike leaves their products unchanged.
    """
    ops, weights = shard.ops, shard.weights
    sizes, name = attention.sizes, f"{prefix}.indexer"
    assert sizes.query_latent_dim is not None
    assert attention.is_interleaved
    order = torch.arange(indexer.head_dim)
    if not indexer.is_interleaved:
        order[: sizes.rope_dim] = order[: sizes.rope_dim].view(2, -1).T.flatten()
    heads = indexer.num_heads
    query = weights.dense(f"{name}.wq_b", (heads * indexer.head_dim, sizes.query_latent_dim))
    query = query.view(heads, indexer.head_dim, -1)[:, order].flatten(0, 1)
    key = weights.dense(f"{name}.wk", (indexer.head_dim, config.hidden_size))[order]
    head_weights = weights.dense(f"{name}.weights_proj", (heads, config.hidden_size))
    norm_weight, norm_bias = (
        weights.read(f"{name}.k_norm.{part}", (indexer.head_dim,))[order] for part in ("weight", "bias")
    )
    projections = IndexerProjections(
        query=Linear(ops, query, weights.dtype),
        key=Linear(ops, key, weights.dtype),
        key_norm=LayerNorm(ops, norm_weight, norm_bias, _NORM_EPS),
        # Computed in float32 whatever the model's dtype, as in transformers.
        head_weights=Linear(ops, head_weights.float(), torch.float32),
    )
    return Indexer(ops, projections, num_heads=heads, num_selected=indexer.num_selected)


def _load_norm(shard: Shard, name: str, size: int) -> RmsNorm:
    return RmsNorm(shard.ops, shard.weights.read(f"{name}.weight", (size,)), _NORM_EPS)
