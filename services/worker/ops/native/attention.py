"""Attention over the paged cache, read in place by block table: kernels/attention*.cpp.

A step is cut into pieces once for all layers with the same window and the same heads. Decodes, drafts, chunks and whole
prompts are pieces of one list, whatever the kind of the step: new tokens are read from the cache.
"""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.cpu import mla
from services.worker.ops.cpu.plan import CpuPlan
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.state import NativeState, Workspace

# The fields of `PlanArgs` and its `sizes`, the size of `Piece` in numbers of 32 bits, the fields of `Step` and
# `AttentionArgs`.
_plan_args = Struct("PP q 6q PqP").pack
_NUM_SIZES = 5
_PIECE_SIZE = 16
_step = Struct("P2q P2q Pq PP 5q")
_attention_args = Struct("P P3q 4Pq PPd").pack

# What the cut depends on besides the step: window, query heads, key/value heads, the widths of keys and values.
Heads = tuple[int | None, int, int, int, int]


class Pieces:
    """How a step is cut, and the memory that its pieces need."""

    __slots__ = ("_step", "address", "memory")

    def __init__(self) -> None:
        self._step = ctypes.create_string_buffer(_step.size)
        self.address = ctypes.addressof(self._step)
        """The address of a `Step`."""
        self.memory: tuple[object, ...] = ()
        """What the step refers to."""

    def set(self, *fields: int, memory: tuple[object, ...]) -> None:
        """Set the fields of the `Step`."""
        _step.pack_into(self._step, 0, *fields)
        self.memory = memory


class NativePlan(CpuPlan):
    """One step's attention: its pieces, and what the `cpu` backend needs for sparse attention."""

    __slots__ = ("_library", "_pieces", "_tables", "_workspace", "slot_mapping")

    def __init__(
        self, metadata: AttentionMetadata, kv_cache: KvCache, library: ctypes.CDLL, workspace: Workspace
    ) -> None:
        super().__init__(metadata, kv_cache)
        self.slot_mapping = metadata.slot_mapping.contiguous()
        self._tables = metadata.block_tables.contiguous()
        self._library = library
        self._workspace = workspace
        self._pieces: dict[Heads, Pieces] = {}

    def pieces(self, heads: Heads) -> Pieces:
        """The pieces for these heads, computed once."""
        if heads not in self._pieces:
            self._pieces[heads] = Pieces()
            self._cut(heads)
        return self._pieces[heads]

    def renew(self) -> None:
        for heads in self._pieces:
            self._cut(heads)

    def _cut(self, heads: Heads) -> None:
        metadata, workspace = self.metadata, self._workspace
        starts, lengths = metadata.cu_seqlens_q.contiguous(), metadata.context_lens.contiguous()
        num_threads, sizes_of_heads = self._library.ls_num_threads(), (heads[0] or 0, *heads[1:])
        sizes = (ctypes.c_int64 * _NUM_SIZES)()
        capacity, needed = 0, 4 * (len(lengths) + num_threads)
        while needed > capacity:
            capacity = needed
            pieces = torch.empty(capacity, _PIECE_SIZE, dtype=torch.int32)
            self._library.ls_plan_attention(
                _plan_args(
                    *(starts.data_ptr(), lengths.data_ptr(), len(lengths)),
                    *(*sizes_of_heads, num_threads),
                    *(pieces.data_ptr(), capacity, ctypes.addressof(sizes)),
                )
            )
            needed = sizes[0]
        num_pieces, num_threads, scratch_size, partials, counters = sizes
        workspace.grow(scratch=num_threads * scratch_size, partials=partials, counters=counters)
        tables = self._tables
        self._pieces[heads].set(
            *(tables.data_ptr(), tables.shape[1], self._kv_cache.block_size),
            *(pieces.data_ptr(), num_pieces, num_threads),
            *(workspace.scratch.data_ptr(), scratch_size),
            *(workspace.partials.data_ptr(), workspace.counters.data_ptr()),
            *sizes_of_heads,
            memory=(tables, pieces, workspace.scratch, workspace.partials, workspace.counters),
        )


def plan_attention(native: NativeState, metadata: AttentionMetadata, kv_cache: KvCache) -> NativePlan:
    """Cut the step into pieces, for a layer's heads when they are first needed."""
    plan = NativePlan(metadata, kv_cache, native.library, native.workspace)
    native.results.add_plan(plan)
    return plan


def decode_attention(
    native: NativeState, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
) -> Tensor:
    """Attend piece by piece."""
    keys, values = cache[0], cache[1]
    _, _, num_kv_heads, key_dim = keys.shape
    scales = (0, 0) if len(cache) == 2 else (cache[2].data_ptr(), cache[3].data_ptr())
    return _attend(
        native,
        query,
        (keys.data_ptr(), values.data_ptr(), *scales, FORMATS[keys.dtype]),
        plan,
        (params.window, query.shape[1], num_kv_heads, key_dim, values.shape[3]),
        sinks=0 if params.sinks is None else params.sinks.data_ptr(),
        scale=params.scale,
    ).flatten(1)


def mla_attention(
    native: NativeState,
    query: Tensor,
    latent_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    value_dim: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend piece by piece, all heads to one key; sparse, as the `cpu` backend does."""
    if selected is not None:
        return mla.mla_attention(native, query, latent_cache, plan, scale=scale, value_dim=value_dim, selected=selected)
    # A key begins with its value, which the kernel knows by their equal addresses.
    latents = latent_cache.data_ptr()
    cache = (latents, latents, 0, 0, FORMATS[latent_cache.dtype])
    heads = (None, query.shape[1], 1, query.shape[2], value_dim)
    return _attend(native, query, cache, plan, heads, sinks=0, scale=scale)


def _attend(
    native: NativeState,
    query: Tensor,
    cache: tuple[int, ...],
    plan: AttentionPlan,
    heads: Heads,
    *,
    sinks: int,
    scale: float,
) -> Tensor:
    """Returns [T, H, V]. `cache` is keys, values, their scales and their format, as in `AttentionArgs`."""
    assert isinstance(plan, NativePlan)
    num_tokens, num_heads, _ = query.shape
    token_stride, head_stride, element_stride = query.stride()
    assert element_stride == 1
    output = native.results.empty(num_tokens, num_heads, heads[4], dtype=query.dtype)
    native.library.ls_attention(
        _attention_args(
            plan.pieces(heads).address,
            *(query.data_ptr(), token_stride, head_stride, FORMATS[query.dtype]),
            *cache,
            *(sinks, output.data_ptr(), scale),
        )
    )
    return output
