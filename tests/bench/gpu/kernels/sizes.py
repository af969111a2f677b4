"""What the ops stage calls: kernels, those that they are compared with, and the sizes of their arguments."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, LayerCache
from services.worker.ops import Ops
from tests.support.models.paged_model import attention_metadata

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Op:
    """One of our kernels, and what computes the same elsewhere."""

    name: str
    """With its sizes."""
    launch: Launch
    yardsticks: Mapping[str, Launch]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Those of Qwen3-8B, of Qwen3-30B-A3B's experts and of DeepSeek-V3's latents; or small ones."""

    num_tokens: int = 256
    hidden: int = 4096
    inner: int = 12288
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936
    decode: tuple[int, int] = (32, 1024)
    """Sequences, and the tokens of each."""
    prefill: tuple[int, int] = (8, 2048)
    product_rows: tuple[int, ...] = (1, 32, 256)
    num_experts: int = 128
    num_chosen: int = 8
    expert_hidden: int = 2048
    expert_inner: int = 768
    expert_rows: tuple[int, ...] = (1, 32, 1024)
    num_latent_heads: int = 128
    latent: tuple[int, int] = (512, 64)
    """Width of the latent, and of the rotated key."""
    latent_decode: tuple[int, int] = (64, 4096)
    num_selected: int = 2048
    """Of a context, by the sparse indexer."""
    group_size: int = 128


PUBLISHED = Sizes()
TINY = Sizes(
    num_tokens=3,
    hidden=64,
    inner=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocabulary=400,
    decode=(2, 20),
    prefill=(2, 20),
    product_rows=(1, 3),
    num_experts=8,
    num_chosen=2,
    expert_hidden=32,
    expert_inner=32,
    expert_rows=(3,),
    num_latent_heads=4,
    latent=(32, 16),
    latent_decode=(2, 20),
    num_selected=8,
    group_size=32,
)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Ground:
    """Where ops run, and on what."""

    ops: Ops
    device: torch.device
    sizes: Sizes

    @property
    def dtype(self) -> torch.dtype:
        """That of activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def paged(self, layer: LayerCache, num_seqs: int, context: int, num_new: int) -> Paged:
        """A step of sequences with `context` tokens, the last `num_new` of them new, and a cache of random values."""
        per_seq = -(-context // _BLOCK_SIZE)
        tables = [list(range(seq * per_seq, (seq + 1) * per_seq)) for seq in range(num_seqs)]
        metadata = attention_metadata(
            tables, [num_new] * num_seqs, [context] * num_seqs, block_size=_BLOCK_SIZE, is_prefill=num_new > 1
        )
        names = ("slot_mapping", "block_tables", "context_lens", "cu_seqlens_q")
        metadata = replace(metadata, **{name: getattr(metadata, name).to(self.device) for name in names})
        cache = KvCache(KvCacheSpec((layer,)), num_seqs * per_seq, _BLOCK_SIZE, self.device)
        for tensor in cache.layers[0]:
            tensor.normal_()
        return Paged(metadata, cache, self.ops.plan_attention(metadata, cache))


@dataclass(frozen=True, slots=True)
class Paged:
    """A step's attention."""

    metadata: AttentionMetadata
    cache: KvCache
    plan: AttentionPlan

    @property
    def layer(self) -> tuple[Tensor, ...]:
        """The cache's only layer."""
        return self.cache.layers[0]

    def contexts(self, tensor: Tensor) -> Tensor:
        """A cache tensor by sequence, [sequences, tokens, ...]: sequences have consecutive blocks, in order."""
        num_seqs = len(self.metadata.query_lens)
        by_seq = tensor.view(num_seqs, -1, *tensor.shape[2:])
        return by_seq[:, : self.metadata.max_context_len]


def with_conch(
    yardsticks: dict[str, Launch], module: str, name: str, *args: object, **named: object
) -> dict[str, Launch]:
    """The yardsticks, and conch-triton-kernels' function with these arguments if it is installed."""
    if importlib.util.find_spec("conch") is None:
        return yardsticks

    def launch() -> object:
        # Imported here: if that fails on a device, it fails this yardstick and not the stage.
        function: Callable[..., object] = getattr(importlib.import_module(f"conch.ops.{module}"), name)
        return function(*args, **named)

    return {**yardsticks, "conch": launch}
