"""The layers by themselves: how they combine ops, and what they read from a configuration."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.worker.forward.forward_context import ForwardContext, forward_context, get_forward_context
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.layers.linear import Linear
from services.worker.layers.shard import Part, Shard
from services.worker.ops import load_ops
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.weight_files import WeightFiles
from tests.support.models.paged_model import attention_metadata

OPS = load_ops("cpu")


def make_context() -> ForwardContext:
    cache = KvCache(KvCacheSpec((attention_cache(1, 2, torch.float32),)), num_blocks=1, block_size=4)
    metadata = attention_metadata([[0]], [1], [1], block_size=4, is_prefill=True)
    return ForwardContext(OPS.plan_attention(metadata, cache), cache)


def test_contexts_nest_and_end() -> None:
    outer, inner = make_context(), make_context()
    with forward_context(outer):
        with forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    with pytest.raises(LookupError, match="forward context"):
        get_forward_context()


def test_every_thread_has_its_own_context() -> None:
    with forward_context(make_context()), ThreadPoolExecutor(1) as pool:
        outside = pool.submit(get_forward_context)
        with pytest.raises(LookupError, match="forward context"):
            outside.result()


def test_a_context_ends_when_its_body_fails() -> None:
    def fail() -> None:
        with forward_context(make_context()):
            raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        fail()
    with pytest.raises(LookupError, match="forward context"):
        get_forward_context()


def test_a_fused_linear_returns_the_outputs_side_by_side(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    names, sizes = ["q", "k"], [6, 3]
    tensors = {}
    for name, size in zip(names, sizes, strict=True):
        tensors[f"{name}.weight"] = torch.randn(size, 5, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(size, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        shard = Shard(OPS, CheckpointWeights(files, torch.float32))
        linear = Linear.load(shard, names, [Part.whole(size) for size in sizes], inputs=Part.whole(5), has_bias=True)
    x = torch.randn(4, 5, generator=generator)
    expected = torch.cat([x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in names], dim=-1)
    torch.testing.assert_close(linear(x), expected)
