"""What every backend's attention computes: grouped-query and latent, over the paged cache.

Shapes: T tokens of the step, H query heads, K key/value heads, D head dim, V value dim.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams, HeadNorms, RopeRows


class AttentionOps(Protocol):
    """The attention of one backend; see `Ops`."""

    def check_block_size(self, block_size: int) -> None:
        """Check that the kernels can read blocks of `block_size` tokens, at least 1.

        Raises:
            InvalidRequestError: they cannot.
        """

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
        """Prepare a step for the ops below, once for all layers."""

    def write_kv(self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
        """Write the step's keys and values into their slots, in place; a slot of -1 is skipped.

        Args:
            key: [T, K, D], the model's dtype; rows may have any stride.
            value: [T, K, V], likewise.
            cache: Keys [num_blocks, block_size, K, D] and values [num_blocks, block_size, K, V], in one of `kv_dtypes`;
                for int8 the scales of both too, [num_blocks, block_size, K] float32, and for float8_e4m3fn their scales
                [1] float32, which are only read. Written at `slot_mapping` (int64, no repeats).

        Source: arXiv:2309.06180, section 4.1; AITER `reshape_and_cache_flash`.
        """

    def norm_rope_write(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rows: RopeRows,
        *,
        num_heads: int,
        cache: tuple[Tensor, ...],
        plan: AttentionPlan,
    ) -> None:
        """What precedes attention: `rms_norm` of query and key heads, `rope`, and `write_kv`.

        Args:
            qkv: [T, H + 2 K, D], contiguous: query | key | value. The query is written in place; whether the key is
                too depends on the backend, whose `prefill_attention` reads keys here or from the cache.
            norms: None means that heads are not normalised.
            num_heads: H.
            cache: Keys and values, written as by `write_kv`.

        Source: see the three ops; AITER `fused_qk_rope_reshape_and_cache`, which has no norm.
        """

    def write_cache(self, values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
        """Write the step's values into one cache tensor, in place; a slot of -1 is skipped.

        Args:
            values: [T, ...], the cache's dtype; rows may have any stride.
            cache: [num_blocks, block_size, ...]; written at `slot_mapping`.
        """

    def prefill_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, ...],
        plan: AttentionPlan,
        params: AttentionParams,
    ) -> Tensor:
        """Causal attention of new tokens over their sequence: its cached prefix and the new tokens up to themselves.

        Query head h reads key/value head h // (H / K). Called after `write_kv` with the same `key`, `value` and
        `cache`; a backend may read new tokens from either place.

        Args:
            query: [T, H, D]; sequence i's rows are [cu_seqlens_q[i], cu_seqlens_q[i + 1]). Not written.
            key: [T, K, D].
            value: [T, K, V].
            cache: Read by `block_tables` up to `context_lens`.

        Returns:
            [T, H * V], contiguous. Padded tokens' rows are undefined and may not be finite.

        Source: arXiv:2205.14135, algorithm 1; AITER `flash_attn_varlen_func` (no prefix anywhere) and
            `unified_attention` with causal=True.
        """

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its whole context in the cache.

        Arguments and result as in `prefill_attention`. Most sequences have one new token; up to 8 drafts may follow it.

        Source: arXiv:2309.06180, section 4.1; AITER `unified_attention`.
        """

    def mla_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        value_dim: int,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Absorbed multi-head latent attention: all heads share one key per token, which begins with its value.

        For prefill and decode. Called after `write_cache`; new tokens are read from the cache too.

        Args:
            query: [T, H, L]: each head's query in the latent space, then its rotated part. Rows and heads may have any
                stride. Not written.
            latent_cache: [num_blocks, block_size, L], read by `block_tables` up to `context_lens`.
            scale: Multiplies the products of queries and keys.
            value_dim: R; a key's first R elements are its value.
            selected: From `select_context`; None means that every token attends to all tokens up to itself.

        Returns:
            [T, H, R], contiguous. Padded tokens' rows are undefined.

        Source: arXiv:2405.04434, section 2.1 and appendix C; AITER `mla.mla_decode_fwd`, `mla.mla_prefill_fwd`.
        """

    def select_context(
        self,
        index_query: Tensor,
        index_weights: Tensor,
        index_cache: Tensor,
        plan: AttentionPlan,
        *,
        num_selected: int,
    ) -> Tensor | None:
        """The positions, up to its own, that each token attends to in sparse attention.

        Token t scores position s by `sum over h of weights[t, h] * relu(query[t, h] . key[s])`, in float32. The
        `num_selected` best are selected, the lower position among equals; all of them if there are no more.

        Args:
            index_query: [T, Hi, Di]; rows may have any stride. Not written.
            index_weights: [T, Hi], float32; scales included.
            index_cache: [num_blocks, block_size, Di], with the new tokens' keys.
            num_selected: At least 1.

        Returns:
            [T, num_selected] int64: positions in the token's sequence, in any order, -1 for unused entries. None if no
            context is longer than `num_selected`. Rows of padded tokens are undefined, but valid for `mla_attention`.

        Source: DeepSeek-V3.2, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", equation 1.
        """
