"""Mixtures of experts: kernels/experts.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from struct import Struct

import torch
from torch import Tensor

from services.worker.ops.cpu.experts import CpuExperts
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.native.packed import PackedMatrix
from services.worker.ops.native.state import NativeState

# `ExpertsCall` in kernels/experts.cpp.
_experts = Struct("PqddPqPPPqq").pack
_expert = Struct("PP").pack


def prepare_experts(
    native: NativeState, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
) -> ExpertsKernel:
    """Pack the matrices."""
    packed = [
        (
            native.pack(expert.gate_up, expert.gate_up_bias, dtype),
            native.pack(expert.down, expert.down_bias, dtype),
        )
        for expert in experts
    ]
    # A rank of many may have none.
    return NativeExperts(native.library, packed, clamp) if packed else CpuExperts([])


class NativeExperts:
    """Experts computed by one call of a kernel for all tokens."""

    def __init__(
        self, library: ctypes.CDLL, experts: list[tuple[PackedMatrix, PackedMatrix]], clamp: SwigluClamp | None
    ) -> None:
        """`experts` are (gate | up, down), of the same sizes and at least one; their formats may differ."""
        self._function = library.ls_experts
        self._experts = experts
        self._num_inputs, self._dtype = experts[0][0].num_columns, experts[0][0].dtype
        table = b"".join(_expert(gate_up.address, down.address) for gate_up, down in experts)
        self._table = ctypes.create_string_buffer(table)
        alpha, limit = (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
        self._head = (ctypes.addressof(self._table), len(experts), alpha, limit)

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """See `ExpertsKernel`.

        Raises:
            ValueError: `x` has another shape or dtype, or the ids another dtype.
            IndexError: there is no such expert.
        """
        if x.shape[1] != self._num_inputs or x.dtype is not self._dtype:
            raise ValueError(f"expected [T, {self._num_inputs}] {self._dtype}, got {list(x.shape)} {x.dtype}")
        if expert_ids.dtype is not torch.int32:
            raise ValueError(f"expected expert ids of torch.int32, got {expert_ids.dtype}")
        x, ids, weights = x.contiguous(), expert_ids.contiguous(), expert_weights.contiguous()
        output = torch.empty_like(x)
        addresses = ids.data_ptr(), weights.data_ptr(), output.data_ptr()
        place = self._function(_experts(*self._head, x.data_ptr(), self._num_inputs, *addresses, *ids.shape))
        if place != ids.numel():
            raise IndexError(f"expert {int(ids.view(-1)[place])} is not one of {len(self._experts)}")
        return output
