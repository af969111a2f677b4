"""The `aiter` backend: AITER's kernels on an AMD GPU, and our Triton kernels where AITER's compute something else.

No op waits for the device, except that AITER may build or load a kernel at its first call. A row's bits depend on the
batch it is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata as packages

import torch
import triton
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.aiter_ops.attention import AiterPlan, attend, check_block_size
from services.worker.ops.aiter_ops.elementwise import add_rms_norm, rms_norm, rope, silu_and_mul, write_kv
from services.worker.ops.aiter_ops.experts import prepare_experts
from services.worker.ops.aiter_ops.linear import prepare_linear
from services.worker.ops.arguments import AttentionParams, HeadNorms, RopeRows
from services.worker.ops.composed import ComposedOps
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel
from services.worker.ops.triton.backend import TritonOps

_DTYPES = (torch.bfloat16, torch.float16)


class AiterOps(TritonOps):
    """See `Ops` for what each method computes. Models compute in bfloat16 or float16."""

    name = "aiter"
    # AITER's own FP8 is the GPU's: on MI300 a code would be half the number that it is on MI350.
    kv_dtypes = ()

    def numerics(self) -> str:
        versions = f"aiter-{_version()} torch-{torch.__version__} triton-{triton.__version__}"
        return f"aiter {versions} {self.instructions}"

    def quantize_activations(self) -> None:
        # Its experts have no FP8 weights.
        ComposedOps.quantize_activations(self)

    def check_block_size(self, block_size: int) -> None:
        check_block_size(block_size)

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        if isinstance(weight, Tensor):
            return prepare_linear(weight, bias)
        return super().prepare_linear(weight, bias, dtype)

    def prepare_embedding(self, weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
        # Every model has one, in the dtype of all its activations.
        if dtype not in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise DeviceError(f"--dtype {name}: the backend aiter has only kernels for bfloat16 and float16")
        return super().prepare_embedding(weight, dtype)

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        tables = super().prepare_rope(cos, sin, is_interleaved=is_interleaved)
        return RopeRows(tables.cos[:, None, None], tables.sin[:, None, None], tables.positions, is_interleaved)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        rope(query_key, rows)

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
        return AiterPlan(metadata, kv_cache.block_size)

    def write_kv(self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
        assert isinstance(plan, AiterPlan)
        write_kv(key, value, cache, plan.metadata.slot_mapping, plan.unit_scale)

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
        # A decode multiplies by 0 what another sequence has left after a context's end, and NaN would remain NaN. The
        # sequence itself still has it in its hidden state.
        qkv[:, num_heads:].nan_to_num_(0.0, 0.0, 0.0)
        ComposedOps.norm_rope_write(self, qkv, norms, rows, num_heads=num_heads, cache=cache, plan=plan)

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        assert isinstance(plan, AiterPlan)
        return attend(query, cache, plan, params)

    # -- Experts ------------------------------------------------------------------------------------------

    # Not `route`: AITER's kernels choose any of equal scores.

    def prepare_experts(
        self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
    ) -> ExpertsKernel:
        weights = list(experts)
        # A rank of many may have none.
        if weights and all(
            isinstance(matrix, Tensor) for expert in weights for matrix in (expert.gate_up, expert.down)
        ):
            return prepare_experts(weights, clamp, dtype)
        return super().prepare_experts(weights, clamp, dtype)


def _version() -> str:
    """AITER's, or "unpacked" where it is not installed."""
    try:
        return packages.version("amd-aiter")
    except packages.PackageNotFoundError:
        return "unpacked"
