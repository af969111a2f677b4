"""The table of kernels that layers call: what every backend computes, in which shapes, and what it writes.

Written with AITER in view (the signatures of its wheel): one backend is an adapter to it, so out-parameters, in-place
effects and layouts are those its kernels can honour. What a kernel wants prepared is prepared once, at load
(`prepare_linear`, `prepare_rope`) or per step (`select_rope`, `plan_attention`), never per layer.

Letters: T tokens of the step, B sequences, H query heads, K key/value heads, D head dim. "dtype" is the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.forward_context import AttentionMetadata, AttentionPlan
from services.worker.kv_cache import KvCache

# Maps [T, in_features] to a new [T, out_features] tensor of the same dtype.
LinearKernel = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RopeRows:
    """What `rope` needs for the positions of one step, made by `select_rope` for all layers.

    A backend whose kernel looks positions up by itself puts whole tables and the positions here.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor


class Ops(Protocol):
    """One backend. Stateless as far as callers see; used from the worker's main thread only."""

    # What `load_ops` calls it.
    name: str
    # Whether a row's bits are the same whatever else is in the batch, however its context was computed.
    is_exact: bool

    def numerics(self) -> str:
        """Names everything of this backend that results depend on: equal strings give equal bits."""

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Bring a weight into the layout that the backend's matmul reads, once, at load.

        The kernel computes `x @ weight.T + bias`. It keeps what it needs; `weight` itself may be dropped.

        Args:
            weight: [out_features, in_features], the model's dtype, contiguous; not written.
            bias: [out_features] of the same dtype, or None.

        Source: AITER `tuned_gemm.tgemm.mm`, whose weight is [N, K] too.
        """

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` [vocabulary, hidden] at `token_ids` [T] int64: a new [T, hidden]."""

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x², -1) + eps) * weight`, as a new [T, hidden].

        Args:
            x: [T, hidden], contiguous; not written.
            weight: [hidden], the same dtype. Mean and root are taken in float32.
            eps: Added to the mean.

        Source: arXiv:1910.07467, equation 4; AITER `rmsnorm2d_fwd`.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then `rms_norm(residual)` as the result.

        The result may be `x`'s memory: a caller must not read `x` afterwards.

        Args:
            x: [T, hidden], contiguous; its contents are lost.
            residual: [T, hidden], the same dtype; written in place.
            weight: [hidden].
            eps: Added to the mean.

        Source: AITER `rmsnorm2d_fwd_with_add`.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(gate) * up` of `x` [T, 2 * intermediate] = gate | up, as [T, intermediate]; x's contents are lost.

        Source: arXiv:2002.05202, section 2 (SwiGLU); AITER `silu_and_mul`.
        """

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor) -> RopeRows:
        """Bring the tables into the backend's form, once, at load; `positions` of the result is empty.

        Args:
            cos: [max_positions, D / 2], float32: cosines of position times frequency.
            sin: The sines, likewise.
        """

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        """What `rope` needs for `positions` [T] int64, made once a step from the result of `prepare_rope`."""

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        """Rotate every head by its token's position, in place, NeoX style (pairs are i and i + D / 2).

        Args:
            query_key: [T, H + K, D], the heads of query and key side by side as the fused projection leaves
                them: the last two dimensions are contiguous, rows may have any stride.
            rows: The step's.

        Source: arXiv:2104.09864, equation 34; AITER `rope_cached_positions_2c_fwd_inplace`, rotate_style 0.
        """

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
        """Derive what the three ops below need from a step's metadata, once for all layers."""

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
        """Write the step's keys and values into their slots, in place; a slot of -1 is skipped.

        Args:
            key: [T, K, D], the cache's dtype; rows may have any stride.
            value: [T, K, D], likewise.
            key_cache: [num_blocks, block_size, K, D]; written at `slot_mapping` (int64, no repeats).
            value_cache: Likewise.
            plan: This backend's, of the step.

        Source: arXiv:2309.06180, section 4.1; AITER `reshape_and_cache_flash`.
        """

    def prefill_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Causal attention of new tokens over their sequence: its cached prefix and the tokens up to themselves.

        Scaled by 1 / sqrt(D). Query head h reads key/value head h // (H / K). Runs after `write_kv`, so that the
        caches hold the new tokens too and a backend may read them from either place.

        Args:
            query: [T, H, D]; sequence i's rows are [cu_seqlens_q[i], cu_seqlens_q[i + 1]). Not written.
            key: [T, K, D], as given to `write_kv`.
            value: [T, K, D], likewise.
            key_cache: [num_blocks, block_size, K, D], read by `block_tables` up to `context_lens`.
            value_cache: Likewise.
            plan: This backend's, of the step.

        Returns:
            [T, H * D], contiguous. Rows of padded tokens hold anything finite or not.

        Source: arXiv:2205.14135, algorithm 1; AITER `flash_attn_varlen_func` (no prefix anywhere) and
            `unified_attention` with causal=True.
        """

    def decode_attention(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> Tensor:
        """Attention of each sequence's new tokens over its whole context in the cache, up to themselves.

        Scaled and grouped as in `prefill_attention`. Runs after `write_kv`. Most sequences have one new token; drafts
        are up to 8 more behind it.

        Args:
            query: [T, H, D]; sequence i's rows are [cu_seqlens_q[i], cu_seqlens_q[i + 1]). Not written.
            key_cache: [num_blocks, block_size, K, D], read by `block_tables` up to `context_lens`.
            value_cache: Likewise.
            plan: This backend's, of the step.

        Returns:
            [T, H * D], contiguous. Rows with a context of 0 (padding) hold anything.

        Source: arXiv:2309.06180, section 4.1; AITER `unified_attention`, and `pa_fwd_asm` where no row has drafts.
        """

    # -- Sampling -----------------------------------------------------------------------------------------

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row and its column, the lowest one of equals; NaN counts as the largest.

        Args:
            logits: [B, vocabulary], float32; not written.

        Returns:
            (token ids [B] int64, largest logits [B] float32).

        Source: AITER `greedy_sample`, which returns the ids alone.
        """
