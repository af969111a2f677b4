"""Compiles AITER's Triton kernels, as the backend `aiter` launches them, for GPUs that this machine does not have.

    python -m tests.support.aiter.compile gfx942 gfx950

prints what `compile_kernels` does. It needs a process of its own in which AITER can be imported, without
`TRITON_INTERPRET`. All tensors are on the meta device.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops import AttentionParams, ExpertWeights, SwigluClamp
from tests.support.kernels.compile_kernels import (
    BF16,
    BLOCK_SIZE,
    MAX_CONTEXT_LEN,
    MODELS,
    OTHER_HEADS,
    PLAIN,
    Model,
    compiling,
    describe,
    kv_cache,
    of_type,
)

_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}


def launch_attention(
    attention: Any, model: Model, num_seqs: int, query_len: int, params: AttentionParams = PLAIN
) -> None:
    """A step of equal sequences."""
    num_tokens = num_seqs * query_len
    metadata = AttentionMetadata(
        is_prefill=query_len > 1,
        slot_mapping=of_type(torch.int64, num_tokens),
        block_tables=of_type(torch.int32, num_seqs, MAX_CONTEXT_LEN // BLOCK_SIZE),
        context_lens=of_type(torch.int32, num_seqs),
        cu_seqlens_q=of_type(torch.int32, num_seqs + 1),
        query_lens=(query_len,) * num_seqs,
        context_lens_host=(MAX_CONTEXT_LEN,) * num_seqs,
        max_query_len=query_len,
        max_context_len=MAX_CONTEXT_LEN,
    )
    qkv = of_type(BF16, num_tokens, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    plan = attention.AiterPlan(metadata, BLOCK_SIZE)
    attention.attend(qkv[:, : model.num_heads], kv_cache(model, BF16), plan, params)


def launch_experts(experts: Any, num_tokens: int) -> None:
    """The experts of gpt-oss-20b."""
    hidden = inner = 2880
    weights = ExpertWeights(
        of_type(BF16, 2 * inner, hidden), of_type(BF16, hidden, inner), of_type(BF16, 2 * inner), of_type(BF16, hidden)
    )
    kernel = experts.GroupedExperts([weights] * 32, SwigluClamp(1.702, 7.0), BF16)
    ids = of_type(torch.int32, num_tokens, 4)
    kernel(of_type(BF16, num_tokens, hidden), ids, of_type(torch.float32, num_tokens, 4))


def launch_all(target: str) -> None:
    """Decodes in parts and whole, drafts and prefills of every shape of heads; and experts."""
    attention: Any = import_module("services.worker.ops.aiter_ops.attention")
    experts: Any = import_module("services.worker.ops.aiter_ops.experts")
    kernels: Any = import_module("aiter.ops.triton.unified_attention")
    kernels.get_num_sms = lambda: _COMPUTE_UNITS[target]
    for model in (*MODELS.values(), *OTHER_HEADS):
        for num_seqs, query_len in ((1, 1), (1024, 1), (8, 9), (8, 2048)):
            launch_attention(attention, model, num_seqs, query_len)
    windowed = AttentionParams(1.0, window=4096, sinks=of_type(torch.float32, 32))
    for num_seqs, query_len in ((8, 1), (8, 2048)):
        launch_attention(attention, MODELS["Qwen3-8B"], num_seqs, query_len, windowed)
    for num_tokens in (1, 64, 4096):
        launch_experts(experts, num_tokens)


def main() -> None:
    """Print every kernel, compiled for each of the targets given."""
    for target in sys.argv[1:]:
        with compiling(target) as compiled:
            launch_all(target)
        for kernel in compiled.values():
            sys.stdout.write(json.dumps(asdict(describe(target, kernel, is_late=False))) + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
