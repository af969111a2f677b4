"""Rotary position embedding of the `reference` backend: one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops.arguments import RopeRows


def prepare_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
    """Keep the tables as they are."""
    return RopeRows(cos, sin, torch.empty(0, dtype=torch.int64), is_interleaved)


def select_rope(tables: RopeRows, positions: Tensor) -> RopeRows:
    """Copy the rows of the step's positions."""
    return RopeRows(tables.cos[positions], tables.sin[positions], positions, tables.is_interleaved)


def rope(query_key: Tensor, rows: RopeRows) -> None:
    """Rotate one token's heads at a time."""
    turned = query_key[..., : 2 * rows.cos.shape[-1]]
    for heads, cos, sin in zip(turned, rows.cos, rows.sin, strict=True):
        if rows.is_interleaved:
            first, second = heads.clone().view(len(heads), -1, 2).unbind(-1)
        else:
            first, second = heads.clone().chunk(2, dim=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        heads.copy_(torch.stack(pair, dim=-1).flatten(-2) if rows.is_interleaved else torch.cat(pair, dim=-1))
