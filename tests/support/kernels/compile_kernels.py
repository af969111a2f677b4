"""Compiles the Triton kernels for GPUs that this machine does not have, as launches with published shapes would.

    python -m tests.support.kernels.compile_kernels gfx942 sm_90

prints one line of JSON per compiled kernel and target. It needs a process of its own, without `TRITON_INTERPRET`. All
tensors are on the meta device, so a launch that waited for the device to learn a value would fail.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops.arguments import Activation, AttentionParams, DecodeRows, HeadNorms, RopeRows, SlotColumns
from services.worker.ops.triton.activation import act_and_mul
from services.worker.ops.triton.advance_batch import advance_batch
from services.worker.ops.triton.attention.decode import decode_attention
from services.worker.ops.triton.attention.plan import TritonPlan
from services.worker.ops.triton.attention.prefill import prefill_attention
from services.worker.ops.triton.attention.tile import PagedSequences
from services.worker.ops.triton.backend import TritonOps
from services.worker.ops.triton.kv_write import write_cache, write_kv
from services.worker.ops.triton.norm import add_rms_norm, layer_norm, rms_norm
from services.worker.ops.triton.norm_rope_write import norm_rope_write
from services.worker.ops.triton.products.fp8_rows import FNUZ, OCP
from services.worker.ops.triton.rope import rope
from tests.support.kernels.exact_launches import launch_exact_latents, launch_exact_products
from tests.support.kernels.latent_launches import launch_latent_attention, launch_odd_latent_steps
from tests.support.kernels.product_launches import (
    launch_experts,
    launch_fp8_experts,
    launch_fp8_products,
    launch_products,
)
from tests.support.kernels.recurrent_launches import launch_recurrent_layers
from tests.support.kernels.run_launches import launch_run_places
from tests.support.kernels.sampling_launches import launch_sampling

exact_attention = partial(prefill_attention, is_exact=True)
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
FP8_ENCODINGS = {"sm_90": OCP, "gfx942": FNUZ, "gfx950": OCP}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PLAIN = AttentionParams(1.0)
NUM_BLOCKS, BLOCK_SIZE = 2**17, 16
MAX_CONTEXT_LEN = 32768


@dataclass(frozen=True)
class CompiledKernel:
    """What a compiler says about one kernel."""

    target: str
    name: str
    constants: str
    is_late: bool
    """Whether only a step of odd sizes needs it, which would wait for the compiler while requests are served."""
    shared_bytes: int
    num_registers: int
    num_spilled_bytes: int
    """Bytes per thread for registers that do not fit."""


@dataclass(frozen=True)
class Model:
    """The sizes of a published model."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_head_norms: bool
    activation: Activation = Activation.SILU
    norm_dtype: torch.dtype = BF16


MODELS = {
    "Qwen3-0.6B": Model(1024, 3072, 16, 8, 128, True),
    "Qwen3-8B": Model(4096, 12288, 32, 8, 128, True),
    "Llama-3.1-8B": Model(4096, 14336, 32, 8, 128, False),
}
# Heads of Llama-3.2-1B, Qwen2-7B and others: groups and widths that are not powers of two.
OTHER_HEADS = (
    Model(2048, 8192, 32, 8, 64, False),
    Model(3584, 18944, 28, 4, 128, False),
    Model(2560, 10240, 32, 32, 80, False),
    Model(2048, 16384, 8, 1, 256, False),
)
GEMMA_3_1B = Model(1152, 6912, 4, 1, 256, True, Activation.GELU_TANH, torch.float32)


class StandInDriver:
    """Answers what a launch asks before it compiles. Each target counts as a device."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target]

    def get_current_device(self) -> str:
        return self._target

    def get_current_stream(self, _device: str) -> int:
        return 0


def launch_layer(model: Model, kv_dtype: torch.dtype = BF16) -> None:
    """A layer's launches in decode steps of 1 to 256 sequences and in a prefill of 8 prompts."""
    for num_seqs in (1, 8, 64, 256):
        launch_all_but_attention(model, num_tokens=num_seqs, kv_dtype=kv_dtype)
        attend(model, decode_attention, num_seqs, query_len=1, kv_dtype=kv_dtype)
        attend(model, decode_attention, num_seqs, query_len=9, kv_dtype=kv_dtype)
    launch_all_but_attention(model, num_tokens=8 * 2048, kv_dtype=kv_dtype)
    attend(model, prefill_attention, 8, query_len=2048, kv_dtype=kv_dtype)


def launch_mixed_step(model: Model) -> None:
    """A step of decodes and chunks through the backend."""
    query_lens, context_lens = (1, 5, 1, 700, 300), (30000, 900, 1, 700, 4000)
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    metadata = AttentionMetadata(
        is_prefill=True,
        slot_mapping=of_type(torch.int64, num_tokens),
        block_tables=of_type(torch.int32, num_seqs, MAX_CONTEXT_LEN // BLOCK_SIZE),
        context_lens=of_type(torch.int32, num_seqs),
        cu_seqlens_q=of_type(torch.int32, num_seqs + 1),
        query_lens=query_lens,
        context_lens_host=context_lens,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    ops, plan, cache = TritonOps(), TritonPlan(metadata), kv_cache(model, BF16)
    heads = of_type(BF16, num_tokens, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    query, key, value = torch.split(heads, [model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=1)
    table = of_type(torch.float32, MAX_CONTEXT_LEN, model.head_dim // 2)
    rows = ops.select_rope(ops.prepare_rope(table, table, is_interleaved=False), of_type(torch.int64, num_tokens))
    ops.rope(heads[:, : -model.num_kv_heads], rows)
    ops.write_kv(key, value, cache, plan)
    ops.prefill_attention(query, key, value, cache, plan, PLAIN)


def launch_decode_inputs(num_seqs: int, num_padded: int, *, num_blocks: int, offset: int = 0) -> None:
    """The launch that makes a decode step's inputs, in the static rows of graphs and in new ones."""
    columns = SlotColumns(
        last_token=of_type(torch.int64, 512),
        position=of_type(torch.int64, 512),
        block_tables=of_type(torch.int32, 512, num_blocks + offset),
    )
    slots = of_type(torch.int64, offset + num_seqs)[offset:]
    static = DecodeRows.padding(num_seqs + num_padded, MAX_CONTEXT_LEN // BLOCK_SIZE, torch.device("meta"))
    for rows in (static, DecodeRows.empty(num_seqs, num_blocks, torch.device("meta"))):
        advance_batch(columns, slots, rows, block_size=BLOCK_SIZE, num_blocks=num_blocks)


def launch_other_attention(model: Model) -> None:
    """The kinds of attention that the models in `MODELS` do not have: a window, sinks, float32."""
    sinks = of_type(torch.float32, model.num_heads)
    attend(model, decode_attention, 8, query_len=1, params=AttentionParams(1.0, window=4096, sinks=sinks))
    attend(model, prefill_attention, 8, query_len=2048, params=AttentionParams(1.0, window=4096, sinks=sinks))
    attend(model, decode_attention, 8, query_len=1, dtype=torch.float32)
    attend(model, prefill_attention, 8, query_len=2048, dtype=torch.float32)


def launch_cache_in_fp8(model: Model) -> None:
    """The launches that read a cache in FP8 besides those of a layer.

    They are on the exact backend, with a window, in float32, and with the widest heads, which need the most registers.
    """
    attend(model, exact_attention, 1, query_len=1, kv_dtype=FP8)
    windowed = AttentionParams(1.0, window=4096, sinks=of_type(torch.float32, model.num_heads))
    for launch, query_len in ((decode_attention, 1), (prefill_attention, 2048)):
        attend(model, launch, 8, query_len=query_len, params=windowed, kv_dtype=FP8)
        attend(model, launch, 8, query_len=query_len, dtype=torch.float32, kv_dtype=FP8)
        attend(OTHER_HEADS[-1], launch, 8, query_len=query_len, kv_dtype=FP8)


def launch_odd_step(model: Model, kv_dtype: torch.dtype = BF16) -> None:
    """Launches of the same model with sizes and alignments that the others do not have."""
    launch_all_but_attention(model, num_tokens=777, offset=1, kv_dtype=kv_dtype)
    odd = partial(attend, model, kv_dtype=kv_dtype, offset=1)
    for num_seqs, max_context_len in ((3, 1600), (777, 4001)):
        odd(decode_attention, num_seqs, query_len=1, max_context_len=max_context_len)
        odd(decode_attention, num_seqs, query_len=9, max_context_len=max_context_len)
    odd(prefill_attention, 3, query_len=259, max_context_len=1600)


def launch_all_but_attention(model: Model, num_tokens: int, *, offset: int = 0, kv_dtype: torch.dtype = BF16) -> None:
    """The launches of a step of `num_tokens`; the columns of the step begin at `offset` in longer ones."""
    num_kv = model.num_kv_heads
    num_qkv = model.num_heads + 2 * num_kv
    hidden, weight = of_type(BF16, num_tokens, model.hidden), of_type(model.norm_dtype, model.hidden)
    qkv = of_type(BF16, num_tokens, num_qkv * model.head_dim)
    heads = qkv.view(num_tokens, num_qkv, model.head_dim)
    key, value = heads[:, model.num_heads : -num_kv], heads[:, -num_kv:]
    head_norm = of_type(model.norm_dtype, model.head_dim)
    slots = of_type(torch.int64, offset + num_tokens)[offset:]
    table = of_type(torch.float32, MAX_CONTEXT_LEN, model.head_dim // 2)
    rows = RopeRows(table, table, slots, is_interleaved=False)
    norms = HeadNorms(head_norm, head_norm, 1e-6) if model.has_head_norms else None
    cache = kv_cache(model, kv_dtype)
    rms_norm(hidden, weight, 1e-6)
    rms_norm(heads[:, : model.num_heads], head_norm, 1e-6)
    add_rms_norm(hidden, hidden, weight, 1e-6)
    layer_norm(hidden, weight, weight, 1e-6)
    act_and_mul(of_type(BF16, num_tokens, 2 * model.inner), model.activation)
    rope(heads[:, :-num_kv], rows)
    write_kv(key, value, cache, slots)
    write_cache(key, of_type(BF16, *cache[0].shape), slots)
    norm_rope_write(qkv, norms, rows, num_heads=model.num_heads, cache=cache, slot_mapping=slots)


def attend(
    model: Model,
    launch: Callable[[Tensor, tuple[Tensor, ...], Tensor, PagedSequences, AttentionParams], None],
    num_seqs: int,
    *,
    query_len: int,
    params: AttentionParams = PLAIN,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    max_context_len: int = MAX_CONTEXT_LEN,
    offset: int = 0,
) -> None:
    """One launch of attention over a query where the fused projection leaves it; `kv_dtype` None means `dtype`."""
    num_tokens = num_seqs * query_len
    qkv = of_type(dtype, num_tokens, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    sequences = PagedSequences(
        block_tables=of_type(torch.int32, offset + num_seqs, max_context_len // BLOCK_SIZE + offset)[offset:],
        context_lens=of_type(torch.int32, offset + num_seqs)[offset:],
        cu_seqlens_q=of_type(torch.int32, offset + num_seqs + 1)[offset:],
        num_tokens=num_tokens,
        max_query_len=query_len,
        max_context_len=max_context_len,
    )
    output = of_type(dtype, num_tokens, model.num_heads * model.head_dim)
    launch(qkv[:, : model.num_heads], kv_cache(model, kv_dtype or dtype), output, sequences, params)


def kv_cache(model: Model, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A layer's cache. Its tensors exceed 2 GiB, which changes how AMD's compiler addresses them."""
    num_blocks = NUM_BLOCKS * BF16.itemsize // dtype.itemsize
    shape = (num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    scales = [of_type(torch.float32, 1) for _ in range(2 if dtype == FP8 else 0)]
    return of_type(dtype, *shape), of_type(dtype, *shape), *scales


def of_type(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def compiling(target: str) -> Iterator[dict[str, Any]]:
    """Instead of launching kernels in the body, compile them, each combination of constants once; by their hash."""
    compiled: dict[str, Any] = {}
    run, hip = JITFunction.run, torch.version.hip

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.setdefault(kernel.hash, kernel)
        return kernel

    driver.set_active(StandInDriver(target))
    JITFunction.run = compile_only
    torch.version.hip = "stand-in" if TARGETS[target].backend == "hip" else None
    try:
        yield compiled
    finally:
        JITFunction.run, torch.version.hip = run, hip


def compile_all(target: str) -> list[CompiledKernel]:
    """Compile every kernel with the constants of every launch."""
    with compiling(target) as compiled:
        for model in MODELS.values():
            launch_layer(model)
        for model in OTHER_HEADS:
            attend(model, decode_attention, 8, query_len=1)
            attend(model, prefill_attention, 8, query_len=2048)
        for num_tokens in (1, 64, 16384):
            launch_all_but_attention(GEMMA_3_1B, num_tokens=num_tokens)
        launch_layer(MODELS["Qwen3-8B"], FP8)
        launch_cache_in_fp8(MODELS["Qwen3-8B"])
        launch_mixed_step(MODELS["Qwen3-8B"])
        launch_decode_inputs(64, 0, num_blocks=128)
        launch_run_places(64, 128, num_passes=4, num_blocks=128)
        launch_other_attention(MODELS["Qwen3-8B"])
        launch_sampling()
        for num_tokens in (1, 64, 256, 4096):
            launch_products(num_tokens)
            launch_fp8_products(num_tokens, FP8_ENCODINGS[target])
        for num_tokens in (1, 1024, 16384):
            launch_experts(num_tokens)
            launch_fp8_experts(num_tokens, FP8_ENCODINGS[target])
        launch_latent_attention()
        launch_recurrent_layers((1,))
        # A row is always computed by the same kernel: a single decode needs the one that all other steps take.
        launch_exact_products(1)
        launch_exact_latents((1,))
        attend(MODELS["Qwen3-8B"], exact_attention, 1, query_len=1)
        num_expected = len(compiled)
        for model in MODELS.values():
            launch_odd_step(model)
        launch_all_but_attention(GEMMA_3_1B, num_tokens=777, offset=1)
        launch_odd_step(MODELS["Qwen3-8B"], FP8)
        launch_odd_latent_steps()
        launch_decode_inputs(3, 5, num_blocks=1, offset=1)
        launch_decode_inputs(1, 0, num_blocks=77, offset=3)
        launch_run_places(3, 777, num_passes=1, num_blocks=77, offset=1)
        for num_tokens in (3, 50, 777):
            launch_products(num_tokens, offset=1)
            launch_fp8_products(num_tokens, FP8_ENCODINGS[target])
        for num_tokens in (3, 777, 9999):
            launch_experts(num_tokens, offset=1)
            launch_fp8_experts(num_tokens, FP8_ENCODINGS[target], offset=1)
        for num_tokens in (64, 2048, 777):
            launch_exact_products(num_tokens, offset=1)
        launch_exact_latents((1, 5, 700), offset=1)
        launch_recurrent_layers((1, 5, 700), offset=1)
        for num_seqs, query_len in ((256, 1), (3, 259)):
            for kv_dtype in (BF16, FP8):
                attend(MODELS["Qwen3-8B"], exact_attention, num_seqs, query_len=query_len, kv_dtype=kv_dtype, offset=1)
    return [describe(target, kernel, is_late=number >= num_expected) for number, kernel in enumerate(compiled.values())]


def describe(target: str, kernel: Any, *, is_late: bool) -> CompiledKernel:
    """What the compiler says about `kernel`."""
    num_registers, num_spilled = nvidia_usage(kernel) if target.startswith("sm_") else amd_usage(kernel)
    metadata = kernel.metadata
    constants = ", ".join(str(value) for value in kernel.src.constants.values())
    return CompiledKernel(target, metadata.name, constants, is_late, metadata.shared, num_registers, num_spilled)


def nvidia_usage(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where ptxas spills registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2]) + int(found[3])


def amd_usage(kernel: Any) -> tuple[int, int]:
    """Vector registers of a thread, and the bytes of its scratch memory.

    Scalar registers that do not fit are kept in vector registers, not in memory, so they are not counted.
    """
    values = dict(re.findall(r"\.([a-z_]+):\s+(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
    return int(values["vgpr_count"]), int(values["private_segment_fixed_size"])


def main() -> None:
    """Print every kernel, compiled for each of the targets given."""
    for target in sys.argv[1:]:
        for kernel in compile_all(target):
            sys.stdout.write(json.dumps(asdict(kernel)) + "\n")


if __name__ == "__main__":
    main()
