"""Ops made of other ops, for backends without a kernel of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.drawing.token_draw import GREEDY_TEMPERATURE, TokenDraw
from services.worker.ops.protocol import DrawRows, Ops


def sample(ops: Ops, logits: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
    """See `Ops.sample`: greedy rows together, the others one by one on the host."""
    token_ids, largest = ops.greedy_sample(logits)
    is_finite = largest.isfinite()
    drawn = ((rows.temperature >= GREEDY_TEMPERATURE) & is_finite).nonzero().flatten()
    if len(drawn):
        values = logits[drawn].cpu().numpy() if len(drawn) < len(logits) else logits.cpu().numpy()
        draws = _draws(rows, drawn)
        tokens = [draw.token(row, position) for row, (draw, position) in zip(values, draws, strict=True)]
        token_ids[drawn] = torch.tensor(tokens, device=token_ids.device)
    return token_ids, is_finite


def _draws(rows: DrawRows, drawn: Tensor) -> list[tuple[TokenDraw, int]]:
    """How the `drawn` rows are drawn, and their positions."""
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.choice, rows.position)
    values = zip(*(column[drawn].tolist() for column in columns), strict=True)
    return [
        (TokenDraw(temperature, top_k, top_p, min_p, seed % 2**64, choice), position)
        for temperature, top_k, top_p, min_p, seed, choice, position in values
    ]
