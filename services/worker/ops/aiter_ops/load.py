"""Makes the `aiter` backend; AITER is imported only here, when it was chosen."""

from __future__ import annotations

import logging

import torch
import triton

from services.worker.device import AITER_GPUS, DeviceError, gpu_architecture
from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.ops.aiter_ops.builds import building
from services.worker.ops.arguments import Activation, AttentionParams
from services.worker.ops.protocol import Ops


def load_aiter_ops() -> Ops:
    """Create the backend and build its kernels, which takes minutes at the first start on a machine.

    Raises:
        DeviceError: AITER has no kernels for the GPU, is not installed, or cannot build a kernel.
    """
    _check_gpu()
    with building():
        try:
            from services.worker.ops.aiter_ops.backend import AiterOps  # noqa: PLC0415

            ops = AiterOps()
        except ImportError as error:
            raise DeviceError(f"--ops-backend aiter: AITER is not complete on this machine: {error}") from error
        except (AssertionError, KeyError, OSError, RuntimeError) as error:
            # It runs ROCm's tools when it is imported.
            raise DeviceError(f"--ops-backend aiter: AITER cannot be loaded: {error}") from error
        _call_each(ops, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    # It says what it builds, which takes long, and from here on what it chose for every new shape.
    logging.getLogger("aiter").setLevel(logging.WARNING)
    return ops


def _check_gpu() -> None:
    if torch.version.hip is None or not torch.cuda.is_available():
        if triton.knobs.runtime.interpret:
            return
        raise DeviceError("--ops-backend aiter needs an AMD GPU")
    architecture = gpu_architecture(torch.cuda.current_device())
    if architecture not in AITER_GPUS:
        raise DeviceError(f"--ops-backend aiter has kernels for {', '.join(AITER_GPUS)}, not for {architecture}")


def _call_each(ops: Ops, device: torch.device) -> None:
    """Call every kernel that is the same for all models: the first call of each builds it."""
    dtype, block_size, width = ops.automatic_dtype, 16, 128
    hidden = torch.zeros(1, width, dtype=dtype, device=device)
    weight = torch.ones(width, dtype=dtype, device=device)
    residual = ops.rms_norm(hidden, weight, 1e-6)
    ops.add_rms_norm(hidden, residual, weight, 1e-6)
    for activation in Activation:
        ops.act_and_mul(hidden, activation)
    ops.prepare_linear(torch.zeros(width, width, dtype=dtype, device=device), None, dtype)(hidden)
    cache = KvCache(KvCacheSpec((attention_cache(1, width, dtype),)), 1, block_size, device)
    metadata = _one_token(device)
    plan = ops.plan_attention(metadata, cache)
    table = torch.zeros(1, width // 2, device=device)
    rows = ops.select_rope(ops.prepare_rope(table, table, is_interleaved=False), metadata.slot_mapping)
    qkv = torch.zeros(1, 3, width, dtype=dtype, device=device)
    ops.norm_rope_write(qkv, None, rows, num_heads=1, cache=cache.layers[0], plan=plan)
    ops.decode_attention(qkv[:, :1], cache.layers[0], plan, AttentionParams(1.0))


def _one_token(device: torch.device) -> AttentionMetadata:
    """A decode of one token, the first of its sequence."""
    return AttentionMetadata(
        is_prefill=False,
        slot_mapping=torch.zeros(1, dtype=torch.int64, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(1, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=device),
        query_lens=(1,),
        context_lens_host=(1,),
        max_query_len=1,
        max_context_len=1,
    )
