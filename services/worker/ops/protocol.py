"""What every backend's kernels compute, in which shapes, and what they write in place.

An AITER backend can be a thin adapter: its wheel's kernels support these out-parameters, in-place effects and layouts.
Preparation happens once at load (`prepare_*`) or per step (`select_rope`, `plan_attention`), never per layer.

Shapes: T tokens of the step, B sequences, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.worker.drawing.row_edits import RowEdits
from services.worker.forward.capture import Capture
from services.worker.forward.kv_cache import LayerCache
from services.worker.ops.arguments import (
    Activation,
    DecodeRows,
    DrawRows,
    RopeRows,
    RunPlaces,
    RunRows,
    SlotColumns,
)
from services.worker.ops.attention_protocol import AttentionOps
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.prepared import Packing
from services.worker.ops.recurrent_protocol import RecurrentOps
from services.worker.ops.routing import RoutingRule

# Maps [T, in_features] to a new [T, out_features] tensor of the same dtype.
LinearKernel = Callable[[Tensor], Tensor]
# Maps token ids [T] int64 to a new [T, hidden] tensor.
EmbeddingKernel = Callable[[Tensor], Tensor]
# Maps [T, H, in_features] to a new [T, H, out_features] tensor of the same dtype.
PerHeadKernel = Callable[[Tensor], Tensor]


class Ops(AttentionOps, RecurrentOps, Protocol):
    """One backend. Stateless to its callers; used from the worker's main thread only.

    A backend's class is flat: it inherits at most its state, and names the function that computes each op.
    """

    name: str
    """Its name in `load_ops`."""
    is_exact: bool
    """Whether a row's bits are independent of the rest of the batch and of how its context was computed."""
    instructions: str
    """What its kernels are compiled for, for the log: a set of instructions, or a GPU."""
    automatic_dtype: torch.dtype
    """The dtype it computes in unless another one is asked for."""
    dtypes: tuple[torch.dtype, ...]
    """The types that it computes in."""
    formats: frozenset[MatrixFormat]
    """What it has kernels for. It takes every other format too, but as a dense copy."""
    automatic_quantization: MatrixFormat | None
    """What matrices of floats are quantised to unless the settings say otherwise; None means nothing."""

    kv_dtypes: tuple[torch.dtype, ...]
    """What keys and values may be stored in besides the model's dtype; see `attention_cache`."""
    draws_on_host: bool
    """Whether the host draws in `sample`, up to milliseconds for each row: none should be drawn needlessly."""

    @property
    def packing(self) -> Packing | None:
        """How weights are packed so that they can outlive the process; None if what is prepared cannot."""

    def numerics(self) -> str:
        """All that this backend's results depend on: equal strings mean equal bits."""

    @property
    def num_threads(self) -> int:
        """How many of the CPU's threads its kernels run on."""

    def use_threads(self, count: int) -> None:
        """Run kernels, torch's too, on so many of the CPU's threads from now on."""

    def quantize_activations(self) -> None:
        """Quantise the rows of products with matrices in FP8 to FP8 too; of those that are prepared from now on.

        Raises:
            DeviceError: the backend has no kernels for that, or the device no instructions.
        """

    def make_capture(self, device: torch.device, layers: Sequence[LayerCache]) -> Capture | None:
        """What captures the decode steps of a model with these caches; None if they must run eagerly."""

    # -- Batch --------------------------------------------------------------------------------------------

    def advance_batch(
        self, columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int
    ) -> None:
        """Make the inputs of a decode step, and advance its sequences to the tokens that it will draw.

        Row i < B computes the last token of the sequence in `slots[i]`, at its position p; its new position is p + 1.
        The rows after these are padding: token 0 at position 0 with a context of 1 that reads block 0, and slot -1.

        Args:
            columns: `position` is written in place, at `slots`.
            slots: [B] int64, no repeats, B at least 0.
            rows: [at least B]; all are written, in place. Of the block tables, only columns below `num_blocks`.
            block_size: Tokens per block.
            num_blocks: The most blocks of a context, at least 1.
        """

    def place_runs(self, runs: RunRows, num_tokens: int, *, block_size: int, num_passes: int) -> RunPlaces:
        """Find the places of runs in passes over them, in each of which every token is one position later.

        Token t of row i is computed at position p = min(firsts[i] + t - starts[i] + pass, ends[i] - 1). It is stored in
        its block, but in slot -1 if it would be at another position or before `stored_from`. A row's context ends with
        its last token.

        Args:
            runs: [B], B at least 1; not written.
            num_tokens: Tokens of all runs together.
            block_size: Tokens per block.
            num_passes: At least 0.
        """

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        """Prepare `x @ weight.T + bias`, once, at load; `weight` may then be freed.

        Args:
            weight: [out_features, in_features], contiguous; not written. A tensor is in `dtype`. The kernel may keep
                it, so it must not be written afterwards either.
            bias: [out_features], in `dtype`.
            dtype: Of the kernel's argument and result.

        Source: AITER `tuned_gemm.tgemm.mm`, whose weight is [N, K] too.
        """

    def prepare_per_head_linear(self, weight: Tensor) -> PerHeadKernel:
        """Prepare `x[:, h] @ weight[h].T` for each head h, once, at load; `weight` may then be freed.

        Argument and result of the kernel need to be contiguous only in the last dimension.

        Args:
            weight: [H, out_features, in_features], the model's dtype, any stride; not written.

        Source: the absorbed products of arXiv:2405.04434, appendix C.
        """

    def prepare_embedding(self, weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
        """Prepare the lookup of rows of `weight`, once, at load.

        Args:
            weight: [vocabulary, hidden], as in `prepare_linear`. A tensor is kept, not copied: it may be very large.
            dtype: Of the kernel's result.
        """

    def prepare_head(self, weight: Matrix, dtype: torch.dtype) -> LinearKernel:
        """Prepare the product that gives logits, once, at load: in `dtype`, or in float32 if that costs nothing.

        Args:
            weight: [vocabulary, hidden], as in `prepare_linear`.
            dtype: What the kernel's argument has.
        """

    def prepare_tied(self, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
        """Prepare an embedding and the head with the same weight; see `prepare_embedding` and `prepare_head`.

        A backend may keep the weight once, in the form that products need.
        """

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x², -1) + eps) * weight`, as a new tensor of x's shape.

        Args:
            x: [T, hidden], or [T, heads, D] to normalise each head; rows may have any stride. Not written.
            weight: [hidden] or [D], the same dtype or float32. Mean and root are in float32; with a weight in float32
                the product is too, and only the result is rounded.

        Source: arXiv:1910.07467, equation 4; AITER `rmsnorm2d_fwd`.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place and return `rms_norm(residual)`.

        Args:
            x: [T, hidden], contiguous. Its contents are lost: the result may use its memory.
            residual: [T, hidden], the same dtype; written in place.
            weight: [hidden], as in `rms_norm`.

        Source: AITER `rmsnorm2d_fwd_with_add`.
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """`(x - mean(x, -1)) / sqrt(var(x, -1) + eps) * weight + bias`, as a new [T, D].

        Args:
            x: [T, D]; rows may have any stride. Not written.
            weight: [D], the same dtype.
            bias: [D], the same dtype.
            eps: Added to the biased variance.

        Source: arXiv:1607.06450, equation 4; AITER `layer_norm`.
        """

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up`, [T, intermediate], for `x` [T, 2 * intermediate] = gate | up.

        `x`'s contents are lost.

        Source: arXiv:2002.05202, section 2 (SwiGLU, GEGLU); AITER `silu_and_mul`, `gelu_tanh_and_mul`.
        """

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Multiply `x`, contiguous, by `factor` in place and return it. The product is rounded from float32."""

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply `x` by the sigmoid of `gate` in place and return it. The product is rounded from float32.

        Args:
            x: [T, D], contiguous.
            gate: [T, D] or [T, 1], the same dtype; rows may have any stride. Not written.

        Source: arXiv:2505.06708, equation 5 (gated attention).
        """

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        """Convert the tables to the backend's form, once, at load; `positions` of the result is empty.

        Args:
            cos: [max_positions, rotary_dim / 2], float32: cosines of position times frequency.
            sin: Likewise, the sines.
            is_interleaved: Whether columns 2 i and 2 i + 1 form a pair (GPT-J); otherwise i and i + rotary_dim / 2
                (NeoX).
        """

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        """What `rope` needs for `positions` [T] int64, once per step, from the result of `prepare_rope`."""

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        """Rotate the first rotary_dim columns of every head by its token's position, in place.

        Args:
            query_key: [T, H + K, D], query and key heads side by side. The last dimension is contiguous; heads and
                rows may have any stride.
            rows: Also defines rotary_dim and the pairs of columns.

        Source: arXiv:2104.09864, equation 34; AITER `rope_cached_positions_2c_fwd_inplace`, rotate_style 0 or 1.
        """

    # -- Experts ------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """Choose each token's experts and compute their weights.

        Args:
            logits: [T, E], float32; not written.

        Returns:
            (expert ids [T, k] int32, no repeats, the lower id among equal scores; their weights [T, k] float32).

        Source: see `routing`; AITER `topk_softmax`, `biased_grouped_topk`, `grouped_topk`.
        """

    def prepare_experts(
        self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
    ) -> ExpertsKernel:
        """Prepare a layer's experts, once, at load.

        The kernel adds up each token's weighted expert outputs in float32, in ascending order of the expert's number.

        Args:
            experts: In order of their numbers. Each may be freed when the next one is read, so memory need not hold all
                of them twice.
            clamp: None means the activation is `silu(gate) * up`.
            dtype: Of the kernel's argument and result.

        Source: arXiv:1701.06538, equation 1; AITER `fused_moe`, whose w1 is gate | up too.
        """

    def combine_experts(self, outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
        """Add up each token's weighted outputs of experts that ran elsewhere, in float32, in the order of the rows.

        With rows in ascending order of their experts, the sums are those of an `ExpertsKernel`; on an exact backend
        bit by bit.

        Args:
            outputs: [N, hidden], the model's dtype; rows may have any stride. Not written.
            tokens: [N] int64, each row's token.
            weights: [N] float32.
            num_tokens: Rows of the result; a token without outputs has zeros.

        Returns:
            A new [num_tokens, hidden] of the dtype of `outputs`.

        Source: arXiv:1701.06538, equation 1.
        """

    # -- Sampling -----------------------------------------------------------------------------------------

    def edit_logits(self, logits: Tensor, edits: Sequence[RowEdits]) -> None:
        """Apply `edits[i]` to row i, in place: what `RowEdits.apply` computes.

        Args:
            logits: [B, vocabulary], float32, contiguous, the largest of each row finite.
            edits: [B], at least one.
        """

    def sample(self, logits: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
        """Draw a token from each row: the one that `TokenDraw.token` draws.

        Args:
            logits: [B, vocabulary], float32; not written.

        Returns:
            (token ids [B] int64, whether the row's largest logit is finite [B] bool). In a row with NaN, +Inf or
            nothing above -Inf the token is meaningless, but one of the vocabulary.

        Source: Gumbel-max, arXiv:1411.0030, section 2.
        """

    def accept(self, drawn: Tensor, wanted: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the tokens drawn at consecutive places, its runs, each row gets; see `Runs`.

        A run goes on after a place if what was drawn there is what is wanted, and the next place was drawn too.

        Args:
            drawn: [P] int64, -1 where logits are not finite.
            wanted: [P] int64: the draft that the next place was computed with, -1 at a run's last place.
            firsts: [B] int64, ascending, from 0: each run's first place.

        Returns:
            (counts [B] int64, at least 1; the last of each run's tokens [B] int64).

        Source: Leviathan et al., arXiv:2211.17192, with draws that are the same with drafts as without.
        """

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of some tokens per row, and of each row's most likely ones, in descending order.

        Args:
            logits: [B, vocabulary], float32, the largest of each row finite; not written.
            token_ids: [B, M] int64, M at least 1: each row's own tokens, in any order, repeats allowed.
            num_top: Most likely tokens after the row's own, n of them: not more than the vocabulary. Ties go to the
                lower id.

        Returns:
            (token ids [B, M + n] int32, log-probabilities [B, M + n] float32, ranks of the rows' own tokens from 1
            [B, M] int32).
        """

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row and its column, the lowest column among equals; NaN counts as the largest.

        Args:
            logits: [B, vocabulary], float32; not written.

        Returns:
            (token ids [B] int64, largest logits [B] float32).

        Source: AITER `greedy_sample`, which returns only the ids.
        """
