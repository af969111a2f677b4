"""What ops are given besides single tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeRows:
    """What `rope` needs for one step's positions.

    A backend whose kernel looks up positions itself stores whole tables and the positions here.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    is_interleaved: bool
    """Whether columns 2 i and 2 i + 1 form a pair; otherwise i and i + rotary_dim / 2."""


class Activation(Enum):
    """What a gated feed-forward network applies to its gate."""

    SILU = "silu"
    """`x * sigmoid(x)`. Source: arXiv:1702.03118, equation 5."""
    GELU_TANH = "gelu_tanh"
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))`. Source: arXiv:1606.08415, section 2."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query and key head before its rotation. Source: arXiv:2505.09388, section 2 (QK-Norm)."""

    query: Tensor
    """[D], the dtype of the heads or float32."""
    key: Tensor
    """[D], likewise."""
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's attention parameters besides the shapes of its tensors."""

    scale: float
    """Multiplies the products of queries and keys."""
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it; None means all tokens before it."""
    sinks: Tensor | None = None
    """[H] float32: a logit per query head that joins the softmax's sum without a value. Source: arXiv:2508.10925."""


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """A layer's parameters of the two gates of each value head; see `RecurrentOps.gated_delta_rule`."""

    decay: Tensor
    """[V] float32, below 0: what the logarithm of a state's decay is a multiple of."""
    bias: Tensor
    """[V] float32."""
    is_tiled: bool = False
    """Whether value head v belongs to key head `v % K`, instead of `v // (V / K)`."""


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How the token of each row is drawn; see `TokenDraw`. On the device of the logits, contiguous."""

    temperature: Tensor  # [B] float32, below 1e-5: greedy
    top_k: Tensor  # [B] int32, 0: all
    top_p: Tensor  # [B] float32, 1: all
    min_p: Tensor  # [B] float32, 0: all
    seed: Tensor  # [B] int64, the bits of the unsigned seed
    choice: Tensor  # [B] int64
    position: Tensor  # [B] int64

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device) -> DrawRows:
        """Rows to be written; until then they are greedy ones at position 0."""
        temperature, top_p, min_p = torch.zeros(3, num_rows, device=device)
        seed, choice, position = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(temperature, top_k, top_p, min_p, seed, choice, position)

    def write(self, rows: DrawRows) -> None:
        """Copy as many rows, in place."""
        for each in fields(self):
            getattr(self, each.name).copy_(getattr(rows, each.name))

    def first(self, num_rows: int) -> DrawRows:
        """Views of the first rows."""
        columns = (getattr(self, each.name) for each in fields(self))
        return DrawRows(*(column[:num_rows] for column in columns))


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """What the device knows of a batch's sequences, by slot. Contiguous."""

    last_token: Tensor
    """[num_slots] int64: the token drawn last, which the next decode computes."""
    position: Tensor
    """[num_slots] int64: its position. The cache holds all tokens before it."""
    block_tables: Tensor
    """[num_slots, most blocks so far] int32."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Inputs of a decode step of one token for each row; see `AttentionMetadata`. Contiguous."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    draw_positions: Tensor  # [num_rows] int64: where the rows' next tokens are drawn
    slot_mapping: Tensor  # [num_rows] int64
    context_lens: Tensor  # [num_rows] int32
    block_tables: Tensor  # [num_rows, at least the blocks of the longest context] int32

    @classmethod
    def padding(cls, num_rows: int, num_blocks: int, device: torch.device) -> DecodeRows:
        """Padding, with room for `num_blocks` blocks in each row."""
        return cls(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            draw_positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            context_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device),
        )

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device) -> DecodeRows:
        """Rows to be written, with room for `num_blocks` blocks each."""
        token_ids, positions, draw_positions, slot_mapping = torch.empty(
            4, num_rows, dtype=torch.int64, device=device
        ).unbind()
        context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
        block_tables = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
        return cls(token_ids, positions, draw_positions, slot_mapping, context_lens, block_tables)

    def first(self, num_rows: int) -> DecodeRows:
        """Views of the first rows."""
        return DecodeRows(
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.draw_positions[:num_rows],
            self.slot_mapping[:num_rows],
            self.context_lens[:num_rows],
            self.block_tables[:num_rows],
        )
