"""The `cpu` backend: batched torch kernels, one call per layer for all rows.

Eager calls have overhead, so they are few and large. oneDNN packs weights once at load, which halves the time of a
float32 decode step. A row's bits depend on its batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.arguments import DecodeRows, RopeRows, SlotColumns
from services.worker.ops.composed import ComposedOps
from services.worker.ops.cpu.batch import advance_batch
from services.worker.ops.cpu.experts import CpuExperts, combine_experts
from services.worker.ops.cpu.mla import CpuMla
from services.worker.ops.experts import Expert, ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.protocol import LinearKernel
from services.worker.ops.routing import RoutingRule, route

# Private to torch, so it may disappear; `F.linear` is the fallback.
_HAS_PACKED_LINEAR = all(hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise"))


class CpuOps(CpuMla, ComposedOps):
    """See `Ops`."""

    name = "cpu"
    is_exact = False

    def numerics(self) -> str:
        packing = "onednn" if _HAS_PACKED_LINEAR else "plain"
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu torch-{torch.__version__} {packing} {capability} threads-{torch.get_num_threads()}"

    # -- Batch --------------------------------------------------------------------------------------------

    def advance_batch(
        self, columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int
    ) -> None:
        is_padded = len(slots) < len(rows.token_ids)
        advance = super().advance_batch if is_padded else advance_batch
        advance(columns, slots, rows, block_size=block_size, num_blocks=num_blocks)

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        weight = dense(weight, dtype)
        if not _can_pack(dtype):
            return partial(F.linear, weight=weight.clone(), bias=bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return partial(_packed_linear, packed=packed, bias=bias)

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        # One cosine and one sine per column, the sine negated for a pair's first column: `rope` then takes three calls.
        cosines, sines = (cos, cos), (-sin, sin)
        join = _join_interleaved if is_interleaved else partial(torch.cat, dim=-1)
        positions = torch.empty(0, dtype=torch.int64)
        return RopeRows(join(cosines).unsqueeze(1), join(sines).unsqueeze(1), positions, is_interleaved)

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        cos, sin = tables.cos.index_select(0, positions), tables.sin.index_select(0, positions)
        return RopeRows(cos, sin, positions, tables.is_interleaved)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        turned = query_key[..., : rows.cos.shape[-1]]
        if rows.is_interleaved:
            swapped = turned.view(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            swapped = torch.roll(turned, turned.shape[-1] // 2, dims=-1)
        turned.mul_(rows.cos).addcmul_(swapped, rows.sin)

    # -- Experts ------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return route(logits, rule)

    def prepare_experts(
        self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
    ) -> ExpertsKernel:
        prepare_linear = partial(self.prepare_linear, dtype=dtype)
        return CpuExperts([Expert(weights, clamp, prepare_linear) for weights in experts])

    def combine_experts(self, outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
        return combine_experts(outputs, tokens, weights, num_tokens=num_tokens)

    # -- Sampling -----------------------------------------------------------------------------------------

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest, token_ids = logits.max(dim=-1)
        return token_ids, largest


def _can_pack(dtype: torch.dtype) -> bool:
    if not _HAS_PACKED_LINEAR:
        return False
    # oneDNN refuses bfloat16 on processors without instructions for it.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(x: Tensor, *, packed: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output


def _join_interleaved(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(pair, dim=-1).flatten(-2)
