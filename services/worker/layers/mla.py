"""Multi-head latent attention: a token keeps one latent in the cache, for all heads, instead of keys and values.

Source: arXiv:2405.04434 (DeepSeek-V2), section 2.1 and appendix C. A head's keys are `W_UK @ latent`, its values
`W_UV @ latent`. Neither is ever computed: W_UK is absorbed into the query, W_UV is applied to what was attended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.forward.forward_context import get_forward_context
from services.worker.layers.indexer import Indexer
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.ops import Ops, PerHeadKernel, RopeRows


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The widths of a layer's tensors."""

    num_heads: int
    # Of a query head and its key: the part without a position, and the rotated one, which all keys share.
    plain_dim: int
    rope_dim: int
    value_dim: int
    # Of the latent that keys and values are made of, and of the one that queries are; None: made of the hidden state.
    latent_dim: int
    query_latent_dim: int | None

    @property
    def head_dim(self) -> int:
        """Of a query head."""
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """What a token keeps: its latent, and the rotated part of its key."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """The weights of a layer."""

    # The query's latent, where there is one, beside the other one and the key's rotated part.
    down: Linear
    query_norm: RmsNorm | None
    # From the query's latent, or from the hidden state, to the heads.
    query: Linear
    latent_norm: RmsNorm
    # [T, H, plain_dim] to [T, H, latent_dim]: W_UK, transposed.
    absorb: PerHeadKernel
    # [T, H, latent_dim] to [T, H, value_dim]: W_UV.
    expand: PerHeadKernel
    # [T, H * value_dim] to [T, hidden].
    output: Callable[[Tensor], Tensor]


class LatentAttention:
    """Projects down, rotates, writes the latent into the cache, attends to it, projects back."""

    def __init__(
        self,
        ops: Ops,
        layer: int,
        sizes: LatentSizes,
        projections: LatentProjections,
        *,
        scale: float,
        indexer: Indexer | None = None,
    ) -> None:
        """Wire one layer.

        Args:
            ops: The backend.
            layer: Its index: which of the cache's tensors are its own.
            sizes: Of its tensors.
            projections: Its weights.
            scale: What the products of queries and keys are multiplied by.
            indexer: Chooses the tokens that each token attends to; None: all before it.
        """
        self._ops = ops
        self._layer = layer
        self._sizes = sizes
        self._projections = projections
        self._scale = scale
        self._indexer = indexer

    def __call__(self, x: Tensor, rope: RopeRows) -> Tensor:
        """[T, hidden] to a new [T, hidden]; writes the cache."""
        ops, sizes, projections = self._ops, self._sizes, self._projections
        context = get_forward_context()
        latent_cache, *index_cache = context.kv_cache.layers[self._layer]
        query_source, latent = self._project_down(x)
        query = projections.query(query_source).view(-1, sizes.num_heads, sizes.head_dim)
        plain, rotated = query[..., : sizes.plain_dim], query[..., sizes.plain_dim :]
        ops.rope(rotated, rope)
        ops.rope(latent[:, None, sizes.latent_dim :], rope)
        ops.write_cache(latent, latent_cache, context.plan)
        selected = None
        if self._indexer is not None:
            selected = self._indexer(x, query_source, rope, index_cache[0])
        attended = ops.mla_attention(
            torch.cat((projections.absorb(plain), rotated), dim=-1),
            latent_cache,
            context.plan,
            scale=self._scale,
            value_dim=sizes.latent_dim,
            selected=selected,
        )
        return projections.output(projections.expand(attended).flatten(1))

    def _project_down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What queries are made of, and what the cache keeps [T, cached_dim], its rotated part not yet turned."""
        projections, latent_dim = self._projections, self._sizes.latent_dim
        down = projections.down(x)
        latent, query_source = down[:, -self._sizes.cached_dim :], x
        if projections.query_norm is not None:
            query_source = projections.query_norm(down[:, : -self._sizes.cached_dim])
        latent[:, :latent_dim] = projections.latent_norm(latent[:, :latent_dim])
        return query_source, latent
