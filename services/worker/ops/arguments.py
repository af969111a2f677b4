"""What ops are given besides single tensors."""

from __future__ import annotations

from dataclasses import dataclass

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
    """See `Ops.prepare_rope`."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query and key head before its rotation. Source: arXiv:2505.09388, section 2 (QK-Norm)."""

    query: Tensor
    """[D], the dtype of the heads."""
    key: Tensor
    """[D], the dtype of the heads."""
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
class DrawRows:
    """How the token of each row is drawn; see `TokenDraw`. On the device of the logits, contiguous."""

    temperature: Tensor  # [B] float32, below 1e-5: greedy
    top_k: Tensor  # [B] int32, 0: all
    top_p: Tensor  # [B] float32, 1: all
    min_p: Tensor  # [B] float32, 0: all
    seed: Tensor  # [B] int64, the bits of the unsigned seed
    choice: Tensor  # [B] int64
    position: Tensor  # [B] int64
