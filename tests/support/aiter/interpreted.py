"""AITER's own Triton kernels in Triton's interpreter, in float32: a process that answers lines with lines.

Each line is a `Case` in JSON, answered with the largest difference from the reference backend.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.ops import AttentionParams, ExpertWeights, SwigluClamp, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from tests.support.aiter import triton_standins
from tests.support.kernels.attention_batches import Batch, random
from tests.support.kernels.interpreter import quicken
from tests.support.kernels.packed_matrices import PLAIN_NUMBERS, MatrixKind
from tests.support.kernels.paged_attention import PagedStep

_SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """A step's attention, or a layer's experts if `num_experts` is not 0."""

    num_cached: tuple[int, ...] = ()
    num_new: tuple[int, ...] = ()
    block_size: int = 16
    head_dim: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    window: int | None = None
    has_sinks: bool = False
    num_compute_units: int = 1
    """A GPU with more of them splits long contexts over programs."""
    num_experts: int = 0
    num_tokens: int = 0
    has_clamp: bool = False
    """And biases, as in gpt-oss."""
    is_packed: bool = False
    """Whether experts' weights are in int8, which our own kernels multiply by."""
    num_elsewhere: int = 0
    """Experts that are chosen and that another rank has."""


def main() -> None:
    """Answer every line."""
    torch.set_num_threads(1)
    triton_standins.name_gpu()
    quicken(pytest.MonkeyPatch())
    for line in sys.stdin:
        case = Case(**json.loads(line))
        difference = _experts_difference(case) if case.num_experts else _attention_difference(case)
        print(difference, flush=True)  # noqa: T201


def _attention_difference(case: Case) -> float:
    attention: Any = import_module("services.worker.ops.aiter_ops.attention")
    kernels: Any = import_module("aiter.ops.triton.unified_attention")
    kernels.get_num_sms = lambda: case.num_compute_units
    batch = Batch(case.block_size, list(case.num_cached), list(case.num_new), 1)
    step = PagedStep(
        batch,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        key_dim=case.head_dim,
        value_dim=case.head_dim,
    )
    # A decode multiplies what follows its context by 0.
    for tensor in step.cache:
        tensor.nan_to_num_()
    sinks = random(case.num_heads, seed=5) if case.has_sinks else None
    params = AttentionParams(_SCALE, window=case.window, sinks=sinks)
    output = attention.attend(step.query, step.cache, attention.AiterPlan(step.metadata, case.block_size), params)
    return _difference(output, step.expected(params))


def _experts_difference(case: Case) -> float:
    experts: Any = import_module("services.worker.ops.aiter_ops.experts")
    # The activation alone is built for a GPU.
    experts.act_and_mul = load_ops("reference").act_and_mul
    hidden, inner = 48, 40
    kind = MatrixKind(MatrixFormat.INT8) if case.is_packed else PLAIN_NUMBERS
    weights = [
        ExpertWeights(
            gate_up=kind.make(2 * inner, hidden, seed=number),
            down=kind.make(hidden, inner, seed=100 + number),
            gate_up_bias=random(2 * inner, seed=200 + number) if case.has_clamp else None,
            down_bias=random(hidden, seed=300 + number) if case.has_clamp else None,
        )
        for number in range(case.num_experts)
    ]
    clamp = SwigluClamp(1.702, 7.0) if case.has_clamp else None
    x = random(case.num_tokens, hidden)
    chosen = random(case.num_tokens, case.num_experts + case.num_elsewhere, seed=7).topk(2, dim=1)
    arguments = x, chosen.indices.clamp(max=case.num_experts).int(), chosen.values.softmax(dim=1)
    expected = load_ops("reference").prepare_experts(weights, clamp, torch.float32)(*arguments)
    backend: Any = import_module("services.worker.ops.aiter_ops.backend")
    return _difference(backend.AiterOps().prepare_experts(weights, clamp, torch.float32)(*arguments), expected)


def _difference(output: Tensor, expected: Tensor) -> float:
    return float((output - expected).abs().nan_to_num(torch.inf).max())


if __name__ == "__main__":
    main()
    os._exit(0)
