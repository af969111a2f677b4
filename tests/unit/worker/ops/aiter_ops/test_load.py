"""What the backend says where AITER cannot be used, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.worker.device import DeviceError
from services.worker.ops import load_ops
from tests.support.aiter.process import aiter_environment
from tests.support.system.processes import ROOT

LOADED = """
import math
import torch
from tests.support.aiter import triton_standins

triton_standins.install()
from services.worker.forward.kv_cache import CacheTensor, KvCache, KvCacheSpec, attention_cache
from services.worker.ops import load_ops
from services.worker.runner.start.number_formats import choose_dtype, choose_kv_dtype
from tests.support.kernels.attention_batches import Batch

dtype = torch.bfloat16
ops, heads = load_ops("aiter"), attention_cache(1, 16, dtype)
print(ops.automatic_dtype, ops.numerics())
gpu = torch.device("cuda")
print(*(ops.make_capture(gpu, layers) is not None for layers in ([heads], [heads, (CacheTensor((576,), dtype),)])))
for refused in (
    lambda: choose_dtype("float32", ops),
    lambda: ops.check_block_size(8),
    lambda: ops.check_block_size(24),
    lambda: choose_kv_dtype("fp8", dtype, ops),
    lambda: ops.quantize_activations(),
):
    try:
        refused()
    except Exception as error:
        print(type(error).__name__, error)

batch = Batch(16, [0], [3], 1)
cache = KvCache(KvCacheSpec((heads,)), batch.num_blocks, 16)
plan = ops.plan_attention(batch.metadata(), cache)
table = torch.ones(4, 8)
rows = ops.select_rope(ops.prepare_rope(table, table, is_interleaved=False), torch.arange(3))
qkv = torch.tensor([1.0, math.nan, math.inf], dtype=dtype)[:, None, None].repeat(1, 3, 16)
ops.norm_rope_write(qkv, None, rows, num_heads=1, cache=cache.layers[0], plan=plan)
print([each.isfinite().all().item() for each in cache.layers[0]], qkv[1:, 0].isfinite().any().item())
"""

FAILED_BUILD = """
from tests.support.aiter import triton_standins

triton_standins.name_gpu()
from services.worker.ops import load_ops

try:
    load_ops("aiter")
except Exception as error:
    print(type(error).__name__, error)
"""


def run(script: str, directory: Path, *, with_standins: bool) -> list[str]:
    """The lines that a process with AITER prints."""
    environment = {**os.environ, **aiter_environment(directory, with_standins=with_standins)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `LOADED` prints."""
    return run(LOADED, tmp_path_factory.mktemp("aiter"), with_standins=True)


@pytest.mark.process
def test_models_compute_in_bfloat16_and_graphs_hold_latent_attention_too(lines: list[str]) -> None:
    assert lines[0].startswith("torch.bfloat16 aiter aiter-")
    assert lines[1] == "True True"


@pytest.mark.process
def test_what_has_no_kernels_is_refused(lines: list[str]) -> None:
    text = "InvalidRequestError block_size: must be a power of two and at least 16 with the backend aiter"
    dtype = "DeviceError --dtype float32: the backend aiter has only kernels for bfloat16 and float16"
    kv_dtype = "DeviceError --kv-cache-dtype fp8: the kernels of aiter have only bfloat16"
    activations = "DeviceError --activation-quantization fp8: the backend aiter has no kernels for it, but triton has"
    assert lines[2:7] == [dtype, text, text, kv_dtype, activations]


@pytest.mark.process
def test_what_one_sequence_leaves_in_a_block_is_finite(lines: list[str]) -> None:
    assert lines[7:] == ["[True, True] False"]


@pytest.mark.process
def test_a_kernel_that_cannot_be_built_is_an_error_at_start(tmp_path: Path) -> None:
    """AITER ends the process where its compiler fails."""
    (line,) = run(FAILED_BUILD, tmp_path, with_standins=False)
    assert line.startswith("DeviceError AITER cannot build a kernel; the log has the compiler's message: [aiter] build")


def test_without_an_amd_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(DeviceError, match="--ops-backend aiter needs an AMD GPU"):
        load_ops("aiter")


@pytest.mark.skipif(importlib.util.find_spec("aiter") is not None, reason="AITER is installed")
def test_where_aiter_is_not_installed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    with pytest.raises(DeviceError, match="AITER is not complete on this machine: No module named 'aiter'"):
        load_ops("aiter")
