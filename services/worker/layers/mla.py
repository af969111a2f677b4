"""Multi-head latent attention: a token keeps one latent in the cache, for all heads, instead of keys and values.

    a token's cache row    | latent                       | rotated key            |    shared by all heads
    its key                |<--------------------- cached_dim --------------------->|
    its value              |<-------- latent_dim -------->|
    a head's query         | W_UK^T @ plain part          | rotated part           |

Source: arXiv:2405.04434 (DeepSeek-V2), section 2.1 and appendix C. A head's keys `W_UK @ latent` and values
`W_UV @ latent` are never computed: W_UK is absorbed into the query, and W_UV is applied to the attention's output.
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
    plain_dim: int
    """A query head's part without a position."""
    rope_dim: int
    """A query head's rotated part."""
    value_dim: int
    latent_dim: int
    query_latent_dim: int | None
    """None means that queries are projected from the hidden state."""

    @property
    def head_dim(self) -> int:
        """Width of a query head."""
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Width of a cache row."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """A layer's weights."""

    down: Linear
    """Projection to the query's latent, if there is one, then to the latent and the key's rotated part."""
    query_norm: RmsNorm | None
    query: Linear
    """Projection from the query's latent, or else from the hidden state."""
    latent_norm: RmsNorm
    absorb: PerHeadKernel
    """W_UK transposed, [T, H, plain_dim] to [T, H, latent_dim]."""
    expand: PerHeadKernel
    """W_UV, [T, H, latent_dim] to [T, H, value_dim]."""
    output: Callable[[Tensor], Tensor]
    """[T, H * value_dim] to [T, hidden]."""


class LatentAttention:
    """One layer's attention."""

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
        """Create one layer.

        Args:
            layer: Index in the cache.
            sizes: With this rank's number of heads.
            scale: Multiplies the products of queries and keys.
            indexer: None means that each token attends to what the last layer with an indexer selected, or to all
                tokens up to itself if no layer has one.
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
        selection = context.selection
        if self._indexer is not None and not selection.is_pinned:
            selection.positions = self._indexer(x, query_source, rope, index_cache[0])
        attended = ops.mla_attention(
            torch.cat((projections.absorb(plain), rotated), dim=-1),
            latent_cache,
            context.plan,
            scale=self._scale,
            value_dim=sizes.latent_dim,
            selected=selection.positions,
        )
        return projections.output(projections.expand(attended).flatten(1))

    def _project_down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The query projection's input, and the cache rows [T, cached_dim] with unrotated keys."""
        projections, latent_dim = self._projections, self._sizes.latent_dim
        down = projections.down(x)
        latent, query_source = down[:, -self._sizes.cached_dim :], x
        if projections.query_norm is not None:
            query_source = projections.query_norm(down[:, : -self._sizes.cached_dim])
        latent[:, :latent_dim] = projections.latent_norm(latent[:, :latent_dim])
        return query_source, latent
