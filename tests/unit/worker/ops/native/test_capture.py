"""Captured calls on every set of instructions: a replay computes what the calls would compute now."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from services.worker.forward.capture import NotRepeatableError
from services.worker.forward.kv_cache import attention_cache
from services.worker.ops import Activation, AttentionParams, HeadNorms
from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.capture import NativeCapture, ReplayMemory
from services.worker.ops.native.isa import available_isas
from tests.support.kernels.attention_batches import Batch, random

DIM, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 4, 2, 16
# Of three decodes: those of a later step are cut into other pieces.
CONTEXT_LENS, LATER_CONTEXT_LENS = [4, 41, 17], [20, 470, 18]
WINDOWS = pytest.mark.parametrize("window", [None, 24])

Compute = Callable[[Tensor], Tensor]

# `view` passes through what refuses torch's computations.
CAPTURE = """
import sys
import torch
from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.isa import available_isas
x = torch.ones(2, 8)
NativeOps(available_isas()[-1]).make_capture(torch.device("cpu"), [])(lambda: x.view(4, 4))
sys.exit("torch._dynamo" in sys.modules)
"""


def make_capture(ops: NativeOps) -> NativeCapture:
    capture = ops.make_capture(torch.device("cpu"), [])
    assert isinstance(capture, NativeCapture)
    return capture


def linear(ops: NativeOps) -> Compute:
    return ops.prepare_linear(random(100, DIM, seed=1), random(100, seed=2), torch.float32)


def norms(ops: NativeOps) -> Compute:
    weights = [random(DIM, seed=seed) for seed in range(4)]

    def compute(x: Tensor) -> Tensor:
        residual = ops.rms_norm(x, weights[0], 1e-5)
        normed = ops.layer_norm(x, weights[1], weights[2], 1e-5)
        return ops.add_rms_norm(normed, residual, weights[3], 1e-5)

    return compute


def norm_of_heads(ops: NativeOps) -> Compute:
    weight = random(HEAD_DIM, seed=1)
    return lambda x: ops.rms_norm(x.view(len(x), NUM_HEADS, HEAD_DIM)[:, 1:], weight, 1e-5)


def activation(ops: NativeOps) -> Compute:
    return lambda x: ops.act_and_mul(x, Activation.SILU)


def scaled_activation(ops: NativeOps) -> Compute:
    return lambda x: ops.scale(ops.act_and_mul(x, Activation.GELU_TANH), 0.75)


@pytest.mark.parametrize("make", [linear, norms, norm_of_heads, activation, scaled_activation])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_replay_reads_its_arguments_anew(ops: NativeOps, make: Callable[[NativeOps], Compute], num_rows: int) -> None:
    compute, x = make(ops), random(num_rows, DIM)
    replay = make_capture(ops)(lambda: compute(x))
    for seed in (0, 11, 12):
        x.copy_(random(num_rows, DIM, seed=seed))
        torch.testing.assert_close(replay(), compute(x), atol=0, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_replay_looks_up_the_embeddings_of_other_tokens(ops: NativeOps, is_tied: bool) -> None:
    table = random(50, DIM)
    tied, head = ops.prepare_tied(table, torch.float32)
    embedding = tied if is_tied else ops.prepare_embedding(table, torch.float32)
    token_ids = torch.tensor([3, 49])
    replay = make_capture(ops)(lambda: head(embedding(token_ids)))
    token_ids.copy_(torch.tensor([20, 0]))
    torch.testing.assert_close(replay(), head(embedding(token_ids)), atol=0, rtol=0)


@WINDOWS
def test_a_replay_attends_to_longer_contexts(ops: NativeOps, num_threads: int, window: int | None) -> None:
    assert num_threads
    batch = Batch(16, [length - 1 for length in LATER_CONTEXT_LENS], [1] * 3, order=1)
    metadata = batch.metadata(is_prefill=False)
    cache = batch.make_cache(attention_cache(NUM_KV_HEADS, HEAD_DIM, torch.float32), fill=0.5)
    for seed, tensor in enumerate(cache.layers[0]):
        tensor.copy_(random(*tensor.shape, seed=seed))
    angles = random(480, HEAD_DIM // 2, seed=3)
    tables = ops.prepare_rope(angles.cos(), angles.sin(), is_interleaved=False)
    norms, params = HeadNorms(random(HEAD_DIM, seed=4), random(HEAD_DIM, seed=5), 1e-5), AttentionParams(0.3, window)
    fused, positions = random(3, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), metadata.context_lens.long() - 1
    slots = metadata.slot_mapping.clone()

    def compute() -> Tensor:
        plan = ops.plan_attention(metadata, cache)
        rows = ops.select_rope(tables, positions)
        ops.norm_rope_write(fused, norms, rows, num_heads=NUM_HEADS, cache=cache.layers[0], plan=plan)
        return ops.decode_attention(fused[:, :NUM_HEADS], cache.layers[0], plan, params)

    def set_step(context_lens: list[int], seed: int) -> None:
        fused.copy_(random(*fused.shape, seed=seed))
        metadata.context_lens.copy_(torch.tensor(context_lens))
        positions.copy_(metadata.context_lens - 1)
        blocks = metadata.block_tables.long().gather(1, positions[:, None] // 16)[:, 0]
        metadata.slot_mapping.copy_(blocks * 16 + positions % 16)

    set_step(CONTEXT_LENS, 6)
    replay = make_capture(ops)(compute)
    for context_lens, seed in ((CONTEXT_LENS, 7), (LATER_CONTEXT_LENS, 8), (CONTEXT_LENS, 9)):
        set_step(context_lens, seed)
        attended = replay().clone()
        written = [tensor.clone() for tensor in cache.layers[0]]
        set_step(context_lens, seed)
        torch.testing.assert_close(attended, compute(), atol=0, rtol=0)
        for tensor, expected in zip(written, cache.layers[0], strict=True):
            torch.testing.assert_close(tensor, expected, atol=0, rtol=0)
    assert not torch.equal(metadata.slot_mapping, slots)


def test_what_torch_computes_is_refused_and_calls_are_recorded_no_longer(ops: NativeOps) -> None:
    capture, x = make_capture(ops), random(2, DIM)
    with pytest.raises(NotRepeatableError, match=r"torch computes aten\.mul"):
        capture(lambda: ops.act_and_mul(x, Activation.SILU) * 2)
    other = capture(lambda: ops.act_and_mul(x, Activation.SILU))
    expected = ops.act_and_mul(x, Activation.SILU)
    x.zero_()
    assert expected.any()
    assert not other().any()


def test_captures_of_one_backend_do_not_disturb_each_other(ops: NativeOps) -> None:
    capture, compute = make_capture(ops), norms(ops)
    batches = [random(num_rows, DIM, seed=num_rows) for num_rows in (1, 2, 64, 65, 3)]
    replays = [capture(partial(compute, x)) for x in batches]
    for x, replay in [*zip(batches, replays, strict=True)] * 2:
        torch.testing.assert_close(replay(), compute(x), atol=0, rtol=0)


@pytest.mark.process
@pytest.mark.skipif(not available_isas(), reason="this machine lacks the instructions")
def test_a_capture_does_not_load_torchs_compiler() -> None:
    # It would add 70 MiB to every worker.
    subprocess.run([sys.executable, "-c", CAPTURE], check=True)


def test_the_memory_of_a_freed_tensor_is_used_again() -> None:
    memory = ReplayMemory(8)
    first = memory.empty(3, 5, dtype=torch.bfloat16)
    view, address = first[1:].flatten(), first.data_ptr()
    assert (first.shape, first.dtype) == ((3, 5), torch.bfloat16)
    del first
    # A view holds it.
    assert memory.empty(8, 5, dtype=torch.bfloat16).data_ptr() != address
    del view
    gc.collect()
    taken = [memory.empty(num_rows, 5, dtype=torch.bfloat16) for num_rows in (2, 8)]
    assert address in {tensor.data_ptr() for tensor in taken}
    assert memory.empty(9, 5, dtype=torch.bfloat16).data_ptr() not in {tensor.data_ptr() for tensor in taken}
