"""The paged KV cache: per layer one key and one value tensor, cut into blocks of tokens.

Which block belongs to whom is the scheduler's business; here are only the tensors and their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """What one token needs in the cache. It comes from the model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token_and_layer(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.num_layers * self.bytes_per_token_and_layer


def num_blocks_for(memory_bytes: int, spec: KvCacheSpec, block_size: int) -> int:
    """How many blocks of `block_size` tokens fit into `memory_bytes`; 0 when not even one does.

    Raises:
        ValueError: `block_size` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be at least 1")
    return max(memory_bytes, 0) // (spec.bytes_per_token * block_size)


class KvCache:
    """The cache's tensors, zeroed at start, written by `Ops.write_kv` and read by its attention.

    `layers[i]` is (keys, values) of layer i, each [num_blocks, block_size, num_kv_heads, head_dim], contiguous:
    the "flash" layout that AITER's `unified_attention` and `reshape_and_cache_flash` take.
    """

    def __init__(self, spec: KvCacheSpec, num_blocks: int, block_size: int, device: str = "cpu") -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens is empty")
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (torch.zeros(shape, dtype=spec.dtype, device=device), torch.zeros(shape, dtype=spec.dtype, device=device))
            for _ in range(spec.num_layers)
        )
