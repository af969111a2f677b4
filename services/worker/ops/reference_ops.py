"""The `reference` backend: exact, because it computes every row alone and in a fixed order.

A row's inputs always have the same shape: one row of activations, or one context copied into fresh memory. So kernels
take the same path. All weights are read for every row: only for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward.kv_cache import LayerCache
from services.worker.ops.arguments import RopeRows
from services.worker.ops.composed import ComposedOps
from services.worker.ops.experts import Expert, ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.protocol import LinearKernel, PerHeadKernel
from services.worker.ops.reference_attention import ReferenceAttention
from services.worker.ops.reference_experts import ReferenceExperts, combine_experts
from services.worker.ops.routing import RoutingRule, route


class ReferenceOps(ReferenceAttention, ComposedOps):
    """See `Ops`."""

    name = "reference"
    is_exact = True
    kv_dtypes = (torch.float8_e4m3fn,)

    def numerics(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"reference torch-{torch.__version__} {capability} threads-{torch.get_num_threads()}"

    def make_capture(self, device: torch.device, layers: Sequence[LayerCache]) -> None:
        """See `Ops.make_capture`: its attention reads each step's lengths on the host, and its draws wait."""

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        return partial(_linear, weight=dense(weight, dtype).clone(), bias=bias)

    def prepare_per_head_linear(self, weight: Tensor) -> PerHeadKernel:
        return partial(_per_head_linear, weight=weight.clone(memory_format=torch.contiguous_format))

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _row_by_row(x.flatten(0, -2), lambda row: F.rms_norm(row, weight.shape, weight, eps))
        return rows.view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _row_by_row(x, lambda row: F.layer_norm(row, weight.shape, weight, bias, eps))

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return _row_by_row(x, _silu_and_mul)

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        return RopeRows(cos, sin, torch.empty(0, dtype=torch.int64), is_interleaved)

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        return RopeRows(tables.cos[positions], tables.sin[positions], positions, tables.is_interleaved)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        turned = query_key[..., : 2 * rows.cos.shape[-1]]
        for heads, cos, sin in zip(turned, rows.cos, rows.sin, strict=True):
            if rows.is_interleaved:
                first, second = heads.clone().view(len(heads), -1, 2).unbind(-1)
            else:
                first, second = heads.clone().chunk(2, dim=-1)
            pair = first * cos - second * sin, second * cos + first * sin
            heads.copy_(torch.stack(pair, dim=-1).flatten(-2) if rows.is_interleaved else torch.cat(pair, dim=-1))

    # -- Experts ------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        rows = [route(row.clone().unsqueeze(0), rule) for row in logits]
        return torch.cat([expert_ids for expert_ids, _ in rows]), torch.cat([weights for _, weights in rows])

    def prepare_experts(
        self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
    ) -> ExpertsKernel:
        prepare_linear = partial(self.prepare_linear, dtype=dtype)
        return ReferenceExperts([Expert(weights, clamp, prepare_linear) for weights in experts])

    def combine_experts(self, outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
        return combine_experts(outputs, tokens, weights, num_tokens=num_tokens)

    # -- Sampling -----------------------------------------------------------------------------------------

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest, token_ids = logits.max(dim=-1)
        return token_ids, largest


def _row_by_row(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    # Each row is copied, because its offset in `x` determines its alignment, which may affect the choice of kernel.
    return torch.stack([function(row.clone()) for row in x])


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = _row_by_row(x, lambda row: torch.mv(weight, row))
    return output if bias is None else output.add_(bias)


def _per_head_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    return _row_by_row(x, lambda row: torch.bmm(weight, row.contiguous().unsqueeze(-1)).squeeze(-1))


def _silu_and_mul(row: Tensor) -> Tensor:
    gate, up = row.chunk(2)
    return F.silu(gate) * up
