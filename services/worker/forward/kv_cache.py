"""The paged KV cache: a few tensors per layer, divided into blocks of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.huge_memory import huge_memory

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """What one token stores in one tensor of a layer."""

    shape: tuple[int, ...]
    """(K, D) for keys or values, (K,) for their scales; one dimension for what all heads share (a latent, an indexer's
    key).
    """
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in this tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


LayerCache = tuple[CacheTensor, ...]


def attention_cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    """What ordinary attention stores: keys and values.

    In int8 these are codes in [-127, 127], and two more tensors have their scales: for each token and head the largest
    magnitude over 127, for keys and for values. In float8_e4m3fn all keys of a layer have one scale, and so have all
    values: they are constants of the model, see `Attention`.
    """
    heads = CacheTensor((num_kv_heads, head_dim), dtype)
    if dtype != torch.int8:
        return heads, heads
    scales = CacheTensor((num_kv_heads,), torch.float32)
    return heads, heads, scales, scales


def split_scales(cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and the scales of both, of a layer's cache as ops get it; a cache of plain numbers has no scales."""
    keys, values, *scales = cache
    key_scales, value_scales = scales or (None, None)
    return keys, values, key_scales, value_scales


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """What one token stores, by layer."""

    layers: tuple[LayerCache, ...]
    """Empty for a layer that stores nothing per token, as one with a recurrent state."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return sum(tensor.bytes_per_token for layer in self.layers for tensor in layer)

    @property
    def first_tensor(self) -> CacheTensor:
        """The first tensor of the first layer that stores anything."""
        return next(tensor for layer in self.layers for tensor in layer)


class KvCache:
    """The cache's tensors, zeroed at start, written and read by `Ops`.

    `layers[i]` has layer i's tensors in the order of its `LayerCache`, each contiguous [num_blocks, block_size,
    *shape]: for keys and values the "flash" layout of AITER's `unified_attention` and `reshape_and_cache_flash`. A
    backend may use a block's memory of a tensor in another layout.
    """

    def __init__(self, spec: KvCacheSpec, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens is empty")
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.layers: tuple[tuple[Tensor, ...], ...] = tuple(
            tuple(zeros((num_blocks, block_size, *tensor.shape), tensor.dtype, self.device) for tensor in layer)
            for layer in spec.layers
        )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On the CPU the kernel zeroes pages on first use, so a large cache takes no time at start.

    torch would write all of them: a second per GiB, or several if huge pages must be found. Pages are huge where the
    system has them, since a decode step reads rows of a few hundred bytes from everywhere in a cache; the first is used
    here already, so that the first request does not wait for it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = huge_memory(math.prod(shape) * dtype.itemsize)
    for place in {0, min(_HUGE_PAGE_BYTES, len(memory) - 1)}:
        memory[place] = 0
    return torch.frombuffer(memory, dtype=dtype).view(shape)
