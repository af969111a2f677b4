"""The table of kernels that layers call: what every backend computes, in which shapes, and what it writes.

Written with AITER in view (the signatures of its wheel): one backend is an adapter to it, so out-parameters, in-place
effects and layouts are those its kernels can honour. What a kernel wants prepared is prepared once, at load
(`prepare_linear`, `prepare_experts`, `prepare_rope`) or per step (`select_rope`, `plan_attention`), never per layer.

Letters: T tokens of the step, B sequences, H query heads, K key/value heads, D head dim. "dtype" is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.routing import RoutingRule

# Maps [T, in_features] to a new [T, out_features] tensor of the same dtype.
LinearKernel = Callable[[Tensor], Tensor]
# Maps [T, H, in_features] to a new [T, H, out_features] tensor of the same dtype.
PerHeadKernel = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RopeRows:
    """What `rope` needs for the positions of one step, made by `select_rope` for all layers.

    A backend whose kernel looks positions up by itself puts whole tables and the positions here.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    # Whether columns 2 i and 2 i + 1 of a head are a pair; else i and i + half of the rotated columns.
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What of a layer decides on its attention, beside the shapes of its tensors."""

    # What the products of queries and keys are multiplied by.
    scale: float
    # A token sees itself and the `window` - 1 tokens before it; None: all before it.
    window: int | None = None
    # [H] float32: per query head a logit that joins the softmax's sum and has no value. Source: arXiv:2508.10925.
    sinks: Tensor | None = None


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

    def prepare_per_head_linear(self, weight: Tensor) -> PerHeadKernel:
        """Bring one matrix per head into the layout that the backend's batched matmul reads, once, at load.

        The kernel computes `x[:, h] @ weight[h].T` for each head h. Its argument may have any stride but the last,
        and so may its result. It keeps what it needs; `weight` itself may be dropped.

        Args:
            weight: [H, out_features, in_features], the model's dtype, of any stride; not written.

        Source: the absorbed products of arXiv:2405.04434, appendix C.
        """

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` [vocabulary, hidden] at `token_ids` [T] int64: a new [T, hidden]."""

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x², -1) + eps) * weight`, as a new tensor of x's shape.

        Args:
            x: [T, hidden], or [T, heads, D] for a norm of each head; rows may have any stride. Not written.
            weight: [hidden] or [D], the same dtype. Mean and root are taken in float32.
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

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """`(x - mean(x, -1)) / sqrt(var(x, -1) + eps) * weight + bias`, as a new [T, D].

        Args:
            x: [T, D]; rows may have any stride. Not written.
            weight: [D], the same dtype.
            bias: [D], likewise.
            eps: Added to the variance, which divides by D.

        Source: arXiv:1607.06450, equation 4; AITER `layer_norm`.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """`silu(gate) * up` of `x` [T, 2 * intermediate] = gate | up, as [T, intermediate]; x's contents are lost.

        Source: arXiv:2002.05202, section 2 (SwiGLU); AITER `silu_and_mul`.
        """

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        """Bring the tables into the backend's form, once, at load; `positions` of the result is empty.

        Args:
            cos: [max_positions, rotary_dim / 2], float32: cosines of position times frequency.
            sin: The sines, likewise.
            is_interleaved: Whether pairs are neighbours (GPT-J style), or else half of rotary_dim apart (NeoX style).
        """

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        """What `rope` needs for `positions` [T] int64, made once a step from the result of `prepare_rope`."""

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        """Rotate the first rotary_dim columns of every head by its token's position, in place.

        Args:
            query_key: [T, H + K, D], the heads of query and key side by side as the fused projection leaves
                them: the last dimension is contiguous, heads and rows may have any stride.
            rows: The step's; they know how many columns turn, and which are pairs.

        Source: arXiv:2104.09864, equation 34; AITER `rope_cached_positions_2c_fwd_inplace`, rotate_style 0 or 1.
        """

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
        """Derive what the ops below need from a step's metadata, once for all layers."""

    def write_kv(self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
        """Write the step's keys and values into their slots, in place; a slot of -1 is skipped.

        Args:
            key: [T, K, D], the cache's dtype; rows may have any stride.
            value: [T, K, V], likewise.
            cache: Keys [num_blocks, block_size, K, D] and values [num_blocks, block_size, K, V]; written at
                `slot_mapping` (int64, no repeats).
            plan: This backend's, of the step.

        Source: arXiv:2309.06180, section 4.1; AITER `reshape_and_cache_flash`.
        """

    def write_cache(self, values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
        """Write what the step's tokens keep in one tensor of a cache, in place; a slot of -1 is skipped.

        Args:
            values: [T, ...], the cache's dtype; rows may have any stride.
            cache: [num_blocks, block_size, ...]; written at `slot_mapping`.
            plan: This backend's, of the step.
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
        """Causal attention of new tokens over their sequence: its cached prefix and the tokens up to themselves.

        Query head h reads key/value head h // (H / K). Runs after `write_kv`, so that the cache holds the new tokens
        too and a backend may read them from either place.

        Args:
            query: [T, H, D]; sequence i's rows are [cu_seqlens_q[i], cu_seqlens_q[i + 1]). Not written.
            key: [T, K, D], as given to `write_kv`.
            value: [T, K, V], likewise.
            cache: As given to `write_kv`; read by `block_tables` up to `context_lens`.
            plan: This backend's, of the step.
            params: The layer's.

        Returns:
            [T, H * V], contiguous. Rows of padded tokens hold anything finite or not.

        Source: arXiv:2205.14135, algorithm 1; AITER `flash_attn_varlen_func` (no prefix anywhere) and
            `unified_attention` with causal=True.
        """

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        """Attention of each sequence's new tokens over its whole context in the cache, up to themselves.

        Grouped as in `prefill_attention`. Runs after `write_kv`. Most sequences have one new token; drafts are up to 8
        more behind it.

        Args:
            query: [T, H, D]; sequence i's rows are [cu_seqlens_q[i], cu_seqlens_q[i + 1]). Not written.
            cache: As given to `write_kv`; read by `block_tables` up to `context_lens`.
            plan: This backend's, of the step.
            params: The layer's.

        Returns:
            [T, H * V], contiguous. Rows with a context of 0 (padding) hold anything.

        Source: arXiv:2309.06180, section 4.1; AITER `unified_attention`, and `pa_fwd_asm` where no row has drafts.
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
        """Multi-head latent attention, absorbed: all heads share one key per token, whose beginning is its value.

        For prefills, chunks and decodes alike; runs after `write_cache`, and reads the new tokens from the cache too.

        Args:
            query: [T, H, L]: each head's query in the latent's space, then its rotated part. Rows and heads may have
                any stride. Not written.
            latent_cache: [num_blocks, block_size, L], read by `block_tables` up to `context_lens`.
            plan: This backend's, of the step.
            scale: What the products of queries and keys are multiplied by.
            value_dim: How many of a key's first elements are its value, R.
            selected: What `select_context` gives; None: every token attends to all up to itself.

        Returns:
            [T, H, R], contiguous. Rows of padded tokens hold anything.

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
        """The positions up to itself that each token attends to under sparse attention.

        Token t scores position s by `sum over h of weights[t, h] * relu(query[t, h] . key[s])`, in float32, and the
        `num_selected` best are taken, of equal ones the lower position; all of them where there are no more.

        Args:
            index_query: [T, Hi, Di]; rows may have any stride. Not written.
            index_weights: [T, Hi], float32; scales included.
            index_cache: [num_blocks, block_size, Di], which holds the new tokens' keys too.
            plan: This backend's, of the step.
            num_selected: At least 1.

        Returns:
            [T, num_selected] int64: positions in the token's sequence in any order, -1 for an entry that is not used;
            None where no context of the step is longer, so that every token attends to all. Rows of padded tokens
            hold anything that `mla_attention` takes.

        Source: DeepSeek-V3.2, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", equation 1.
        """

    # -- Experts ------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """Choose each token's experts and weigh them.

        Args:
            logits: [T, E], float32; not written.
            rule: The layer's.

        Returns:
            (expert ids [T, k] int64, no repeats, of equally good ones the lower; their weights [T, k] float32).

        Source: see `routing`; AITER `topk_softmax`, `biased_grouped_topk`, `grouped_topk`.
        """

    def prepare_experts(self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None) -> ExpertsKernel:
        """Bring a layer's experts into the layout that the backend's products read, once, at load.

        For each token the kernel adds up what its experts give, each multiplied by its weight: in float32, by rising
        number of the expert.

        Args:
            experts: By number. Each is asked for when its turn comes, and may be dropped when the next one is, so
                that memory need not hold all of them twice.
            clamp: Of the activation; None: it is `silu(gate) * up`.

        Source: arXiv:1701.06538, equation 1; AITER `fused_moe`, whose w1 is gate | up too.
        """

    def combine_experts(self, outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
        """Add up what experts elsewhere gave for each token, each row multiplied by its weight.

        In float32 and in the order of the rows: rows by rising number of the expert make the sums that an
        `ExpertsKernel` makes, on an exact backend bit by bit.

        Args:
            outputs: [N, hidden], the model's dtype; rows may have any stride. Not written.
            tokens: [N] int64, whose output each row is.
            weights: [N] float32.
            num_tokens: Rows of the result; one that no output is for is zero.

        Returns:
            A new [num_tokens, hidden] of the dtype of `outputs`.

        Source: arXiv:1701.06538, equation 1.
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
