"""Rotary position embedding of the `cpu` backend."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from services.worker.ops.arguments import RopeRows


def prepare_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
    """Make one cosine and one sine per column, the sine negated for a pair's first column."""
    # `rope` then takes three calls.
    cosines, sines = (cos, cos), (-sin, sin)
    join = _join_interleaved if is_interleaved else partial(torch.cat, dim=-1)
    positions = torch.empty(0, dtype=torch.int64)
    return RopeRows(join(cosines).unsqueeze(1), join(sines).unsqueeze(1), positions, is_interleaved)


def select_rope(tables: RopeRows, positions: Tensor) -> RopeRows:
    """Copy the rows of the step's positions."""
    cos, sin = tables.cos.index_select(0, positions), tables.sin.index_select(0, positions)
    return RopeRows(cos, sin, positions, tables.is_interleaved)


def rope(query_key: Tensor, rows: RopeRows) -> None:
    """Rotate all heads at once."""
    turned = query_key[..., : rows.cos.shape[-1]]
    if rows.is_interleaved:
        swapped = turned.view(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = torch.roll(turned, turned.shape[-1] // 2, dims=-1)
    turned.mul_(rows.cos).addcmul_(swapped, rows.sin)


def _join_interleaved(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(pair, dim=-1).flatten(-2)
