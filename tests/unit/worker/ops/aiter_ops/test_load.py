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
from services.worker.runner.number_formats import choose_kv_dtype
from tests.support.kernels.attention_batches import Batch

dtype = torch.bfloat16
ops, heads = load_ops("aiter"), attention_cache(1, 16, dtype)
print(ops.automatic_dtype, ops.numerics())
gpu = torch.device("cuda")
print(*(ops.make_capture(gpu, layers) is not None for layers in ([heads], [heads, (CacheTensor((576,), dtype),)])))
for refused in (
    lambda: ops.prepare_embedding(torch.zeros(4, 4), torch.float32),
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

NUM_LOADED_LINES = 8

# Follows `LOADED` in the same process, which takes seconds to start.
ASSEMBLY = """
from dataclasses import replace
import aiter
from services.worker.ops import AttentionParams
from services.worker.ops.aiter_ops.asm_attention import AsmPlan
from services.worker.ops.aiter_ops.asm_latent import splits_in_use

ops, scale = load_ops("aiter", aiter_decode="asm"), 128**-0.5
print(ops.numerics())
ops.check_block_size(16)
ops.check_attention(32, 2, 128, AttentionParams(scale))
ops.check_latent_attention(16, 512, 64, torch.bfloat16, is_sparse=False)
ops.check_latent_attention(128, 512, 64, torch.bfloat16, is_sparse=False)
for refused in (
    lambda: ops.check_block_size(32),
    lambda: ops.check_attention(9, 3, 64, AttentionParams(64**-0.5)),
    lambda: ops.check_attention(34, 2, 128, AttentionParams(scale)),
    lambda: ops.check_attention(8, 2, 128, AttentionParams(scale, window=4096)),
    lambda: ops.check_attention(8, 2, 128, AttentionParams(scale, sinks=torch.zeros(8))),
    lambda: ops.check_attention(8, 2, 128, AttentionParams(0.0625)),
    lambda: ops.check_latent_attention(32, 512, 64, torch.bfloat16, is_sparse=False),
    lambda: ops.check_latent_attention(16, 256, 64, torch.bfloat16, is_sparse=False),
    lambda: ops.check_latent_attention(16, 512, 64, torch.float16, is_sparse=False),
    lambda: ops.check_latent_attention(16, 512, 64, torch.bfloat16, is_sparse=True),
):
    try:
        refused()
    except Exception as error:
        print(type(error).__name__, error)

step = Batch(16, [30, 40, 100], [1, 5, 30], 1).metadata()
tensors = ("slot_mapping", "block_tables", "context_lens", "cu_seqlens_q")
step = AsmPlan(replace(step, **{name: getattr(step, name).to("meta") for name in tensors}))
print(*step.rows.block_tables.shape, *step.rows.context_lens.shape, *step.contexts.blocks.shape)

read, kernel = [], aiter.mla_decode_stage1_asm_fwd
aiter.mla_decode_stage1_asm_fwd = lambda *arguments: read.append(arguments[6]) or kernel(*arguments)
batch, layer = Batch(16, [40, 3], [1, 1], 1), (CacheTensor((576,), torch.bfloat16),)
cache = KvCache(KvCacheSpec((layer,)), batch.num_blocks, 16)
plan = ops.plan_attention(batch.metadata(is_prefill=False), cache)
query = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
ops.mla_attention(query, cache.layers[0][0], plan, scale=1.0, value_dim=512)
print(read.pop() is splits_in_use(plan.rows, 16, query.dtype))
"""
ASSEMBLY_REFUSES = (
    "heads of 128 columns, not of 64",
    "at most 16 query heads per key head, not 17",
    "no sliding window, here of 4096 tokens",
    "no attention sinks",
    "the scale 0.0884, not 0.0625",
    "16 or 128 heads of latent attention on a rank, not 32",
    "latents and rotated keys of 512 and 64 columns, not of 256 and 64",
    "bfloat16 for latent attention, not float16",
    "no sparse attention",
)

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
def all_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `LOADED` and `ASSEMBLY` print."""
    return run(LOADED + ASSEMBLY, tmp_path_factory.mktemp("aiter"), with_standins=True)


@pytest.fixture
def lines(all_lines: list[str]) -> list[str]:
    """What `LOADED` prints."""
    return all_lines[:NUM_LOADED_LINES]


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


@pytest.fixture
def assembly_lines(all_lines: list[str]) -> list[str]:
    """What `ASSEMBLY` prints."""
    return all_lines[NUM_LOADED_LINES:]


@pytest.mark.process
def test_what_the_assembly_kernels_do_not_fit_is_refused_by_name(assembly_lines: list[str]) -> None:
    numerics, block_size, *layers = assembly_lines[:-2]
    assert numerics.startswith("aiter aiter-")
    assert numerics.endswith(" asm")
    assert block_size == "InvalidRequestError block_size: must be 16 with --aiter-decode asm"
    start, end = "DeviceError --aiter-decode asm: AITER's assembly kernels have ", "; use --aiter-decode triton"
    assert layers == [f"{start}{what}{end}" for what in ASSEMBLY_REFUSES]


@pytest.mark.process
def test_planning_for_the_assembly_kernel_waits_for_no_value(assembly_lines: list[str]) -> None:
    """On the meta device, where there are none: six tokens' rows, and nine blocks of the chunk's context."""
    assert assembly_lines[-2] == "6 9 6 9"


@pytest.mark.process
def test_a_graph_can_keep_what_aiter_makes_for_its_step(assembly_lines: list[str]) -> None:
    assert assembly_lines[-1] == "True"


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
