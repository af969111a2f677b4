"""The `triton` backend: models on a GPU, with our own kernels and torch's products with matrices that are not packed.

No op waits for the device, and launches depend only on shapes and on numbers on the host, so a graph can hold a step.
A row's bits depend on the batch it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.drawing.row_edits import RowEdits
from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams, DecodeRows, DrawRows, HeadNorms, RopeRows, SlotColumns
from services.worker.ops.composed import ComposedOps
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel
from services.worker.ops.routing import RoutingRule
from services.worker.ops.triton.activation import silu_and_mul
from services.worker.ops.triton.advance_batch import advance_batch
from services.worker.ops.triton.attention.context_selection import select_context
from services.worker.ops.triton.attention.decode import decode_attention
from services.worker.ops.triton.attention.latent import latent_attention
from services.worker.ops.triton.attention.prefill import prefill_attention
from services.worker.ops.triton.attention.tile import PagedSequences
from services.worker.ops.triton.kv_write import write_cache, write_kv
from services.worker.ops.triton.norm import add_rms_norm, layer_norm, rms_norm
from services.worker.ops.triton.norm_rope_write import norm_rope_write
from services.worker.ops.triton.products.expert_sums import combine_experts
from services.worker.ops.triton.products.experts import TritonExperts
from services.worker.ops.triton.products.fp8_rows import Fp8Encoding, device_encoding
from services.worker.ops.triton.products.linear import PackedEmbedding, PackedLinear
from services.worker.ops.triton.rope import rope
from services.worker.ops.triton.routing import route
from services.worker.ops.triton.sampling.edits import edit_logits
from services.worker.ops.triton.sampling.greedy import greedy_sample
from services.worker.ops.triton.sampling.sample import sample
from services.worker.ops.triton.sampling.token_logprobs import token_logprobs
from shared.limits import MAX_DRAFT_TOKENS


class TritonPlan(AttentionPlan):
    """A step's sequences by kernel: first those with few new tokens, then the longer chunks.

    A decode with drafts and a short chunk are the same to attention. In a mixed step decodes come first.
    """

    __slots__ = ("chunks", "decodes")

    def __init__(self, metadata: AttentionMetadata) -> None:
        super().__init__(metadata)
        num_decodes = _num_leading_decodes(metadata)
        self.decodes = select_sequences(metadata, slice(0, num_decodes))
        self.chunks = select_sequences(metadata, slice(num_decodes, len(metadata.query_lens)))

    def parts(self) -> list[PagedSequences]:
        """Those of both kinds that there are, in the order of the step."""
        return [part for part in (self.decodes, self.chunks) if part is not None]


class TritonOps(ComposedOps):
    """See `Ops` for what each method computes."""

    name = "triton"
    is_exact = False
    draws_on_host = False
    automatic_dtype = torch.bfloat16
    formats = frozenset(MatrixFormat)
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)

    def __init__(self) -> None:
        super().__init__()
        self.instructions = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
        self._encoding: Fp8Encoding | None = None

    def numerics(self) -> str:
        activations = "" if self._encoding is None else " fp8-activations"
        return f"{self.name} torch-{torch.__version__} triton-{triton.__version__} {self.instructions}{activations}"

    def quantize_activations(self) -> None:
        self._encoding = device_encoding()

    # -- Batch --------------------------------------------------------------------------------------------

    def advance_batch(
        self, columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int
    ) -> None:
        advance_batch(columns, slots, rows, block_size=block_size, num_blocks=num_blocks)

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        # Without a copy: a tied embedding is also the head, and a device has no memory for two.
        if isinstance(weight, Tensor):
            return partial(F.linear, weight=weight, bias=bias)
        return PackedLinear(weight, bias, dtype, encoding=self._encoding)

    def prepare_embedding(self, weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
        return partial(F.embedding, weight=weight) if isinstance(weight, Tensor) else PackedEmbedding(weight, dtype)

    def prepare_tied(self, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
        return self.prepare_embedding(weight, dtype), self.prepare_head(weight, dtype)

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm(x, weight, bias, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        positions = torch.empty(0, dtype=torch.int64, device=cos.device)
        return RopeRows(cos.contiguous(), sin.contiguous(), positions, is_interleaved)

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        return RopeRows(tables.cos, tables.sin, positions, tables.is_interleaved)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        rope(query_key, rows)

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:  # noqa: ARG002
        return TritonPlan(metadata)

    def write_kv(self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
        write_kv(key, value, cache, plan.metadata.slot_mapping)

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
        # The key goes only to the cache, where `prefill_attention` reads it.
        slot_mapping = plan.metadata.slot_mapping
        norm_rope_write(qkv.flatten(1), norms, rows, num_heads=num_heads, cache=cache, slot_mapping=slot_mapping)

    def write_cache(self, values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
        write_cache(values, cache, plan.metadata.slot_mapping)

    def prefill_attention(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        cache: tuple[Tensor, ...],
        plan: AttentionPlan,
        params: AttentionParams,
    ) -> Tensor:
        # Reads only the cache, so that a cached prefix takes the same path as one that was just computed.
        return self.decode_attention(query, cache, plan, params)

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        width = query.shape[1] * cache[1].shape[-1]
        output = torch.empty((query.shape[0], width), dtype=query.dtype, device=query.device)
        if plan.decodes is not None:
            decode_attention(query, cache, output, plan.decodes, params)
        if plan.chunks is not None:
            prefill_attention(query, cache, output, plan.chunks, params)
        return output

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
        assert isinstance(plan, TritonPlan)
        output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
        for sequences in plan.parts():
            latent_attention(query, latent_cache, output, sequences, scale=scale, selected=selected)
        return output

    def select_context(
        self,
        index_query: Tensor,
        index_weights: Tensor,
        index_cache: Tensor,
        plan: AttentionPlan,
        *,
        num_selected: int,
    ) -> Tensor | None:
        assert isinstance(plan, TritonPlan)
        if plan.metadata.max_context_len <= num_selected:
            return None
        return select_context(index_query, index_weights, index_cache, plan.parts(), num_selected=num_selected)

    # -- Experts ------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return route(logits, rule)

    def prepare_experts(
        self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
    ) -> ExpertsKernel:
        return TritonExperts(experts, clamp, dtype, encoding=self._encoding)

    def combine_experts(self, outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
        return combine_experts(outputs, tokens, weights, num_tokens=num_tokens)

    # -- Sampling -----------------------------------------------------------------------------------------

    def edit_logits(self, logits: Tensor, edits: Sequence[RowEdits]) -> None:
        edit_logits(logits, edits)

    def sample(self, logits: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
        return sample(logits, rows)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        return token_logprobs(logits, token_ids, num_top)

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return greedy_sample(logits)


def load_triton_ops() -> TritonOps:
    """Create the backend. Without a GPU, kernels run only in Triton's interpreter.

    Raises:
        DeviceError: as from `check_triton`.
    """
    check_triton(TritonOps.name)
    return TritonOps()


def check_triton(backend: str) -> None:
    """Check that a backend's kernels can run.

    Raises:
        DeviceError: there is no GPU, and the interpreter was not asked for by TRITON_INTERPRET=1.
    """
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        raise DeviceError(f"--ops-backend {backend} needs a GPU")


def _num_leading_decodes(metadata: AttentionMetadata) -> int:
    """How many sequences before the first long chunk have few enough new tokens for the decode kernel."""
    if not metadata.is_prefill:
        return len(metadata.query_lens)
    long_chunks = (seq for seq, length in enumerate(metadata.query_lens) if length > MAX_DRAFT_TOKENS + 1)
    return next(long_chunks, len(metadata.query_lens))


def select_sequences(metadata: AttentionMetadata, seqs: slice) -> PagedSequences | None:
    """The sequences `seqs` of a step; None if there are none."""
    query_lens = metadata.query_lens[seqs]
    if not query_lens:
        return None
    return PagedSequences(
        block_tables=metadata.block_tables[seqs],
        context_lens=metadata.context_lens[seqs],
        cu_seqlens_q=metadata.cu_seqlens_q[seqs.start : seqs.stop + 1],
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_context_len=max(metadata.context_lens_host[seqs]),
    )
