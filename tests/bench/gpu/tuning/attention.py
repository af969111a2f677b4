"""Attention for the tune stage: paged decodes as a graph launches them, and prefills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.ops import AttentionParams
from services.worker.ops.triton.attention.context_splits import SPLIT_LIMITS, SplitLimits
from services.worker.ops.triton.attention.decode import DecodeConfig, choose_decode_config, decode_attention
from services.worker.ops.triton.attention.prefill import PrefillConfig, choose_prefill_config, prefill_attention
from services.worker.ops.triton.attention.tile import PagedSequences, padded
from tests.bench.gpu.floors import Work
from tests.bench.gpu.tuning.subjects import Launches, Place, Subject, Variant, grid, num_copies

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's heads."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    """The most tokens of a sequence: in a graph, launches must expect as many."""

    def token_bytes(self, item_bytes: int) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * item_bytes


@dataclass(frozen=True, slots=True)
class Steps:
    """Sequences, and the tokens of each."""

    heads: Heads
    decodes: tuple[tuple[int, int], ...]
    prefill: tuple[int, int] | None = None


_QWEN3_8B = Heads("Qwen3-8B", 32, 8, 128, 40960)
_QWEN3_0_6B = Heads("Qwen3-0.6B", 16, 8, 128, 40960)
PUBLISHED = (
    Steps(_QWEN3_8B, ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (1, 32768)), prefill=(8, 2048)),
    Steps(_QWEN3_0_6B, ((1, 1024), (32, 1024), (256, 1024))),
)
TINY = (Steps(Heads("tiny", 4, 2, 16, 64), ((2, 20),), prefill=(2, 20)),)

# Stages with which Triton reads no tile ahead, one and two; with 3 the block table alone: see `LOADS_AHEAD_STAGES`.
_STAGES = (2, 5, 7)
_DECODE_SIZES = (
    # Tokens, warps, stages. None spills registers for sm_90.
    *grid((16, 32, 64), (2, 4), _STAGES),
    *grid((32, 64), (8,), (2, 5)),
    *((128, 4, 2), (128, 8, 2), (128, 8, 5), (16, 1, 2), (16, 1, 5), (32, 1, 5), (64, 4, 3)),
)
_DECODE_CONFIGS: tuple[Variant, ...] = tuple({"config": DecodeConfig(*sizes)} for sizes in _DECODE_SIZES)
_SPLIT_LIMITS: tuple[Variant, ...] = tuple(
    {"limits": SplitLimits(*limits)}
    for limits in ((256, 256, 64), (1024, 256, 64), (2048, 256, 64), (512, 256, 16), (512, 256, 32), (1024, 256, 128))
)
_PREFILL_SIZES = (
    # Rows, tokens, warps, stages. As above.
    *grid((64,), (32, 64), (4,), _STAGES),
    *grid((128,), (32, 64), (8,), _STAGES),
    *((64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 8, 5), (256, 32, 8, 5)),
)
_PREFILL_CONFIGS: tuple[Variant, ...] = tuple({"config": PrefillConfig(*sizes)} for sizes in _PREFILL_SIZES)


def attention_subjects(*, is_tiny: bool) -> Iterator[Subject]:
    """Decodes of the first model, its prefill, and the other model's decodes."""
    for steps in TINY if is_tiny else PUBLISHED:
        heads, most = steps.heads, 1 if is_tiny else None
        rounds = _DECODE_CONFIGS[:most], _SPLIT_LIMITS[:most]
        for num_seqs, context in steps.decodes:
            name = f"decode_attention {num_seqs} x {context}, {heads.model}"
            yield Subject(name, partial(_decode, heads, num_seqs, context), rounds)
        if steps.prefill is not None:
            num_seqs, length = steps.prefill
            name = f"prefill_attention {num_seqs} x {length}, {heads.model}"
            yield Subject(name, partial(_prefill, heads, num_seqs, length), (_PREFILL_CONFIGS[:most],))


def _decode(heads: Heads, num_seqs: int, context: int, place: Place) -> Launches:
    item_bytes = place.dtype.itemsize
    num_bytes = num_seqs * context * heads.token_bytes(item_bytes)
    copies = num_copies(num_bytes)
    cache, sequences = _paged(heads, place, num_seqs, copies, context, num_new=1)
    query = _query(heads, place, num_seqs)
    output = place.random(num_seqs, heads.num_heads * heads.head_dim)
    params = AttentionParams(heads.head_dim**-0.5)

    def launch(turn: int, **variant: object) -> Tensor:
        decode_attention(query, cache, output, sequences[turn % copies], params, **variant)  # type: ignore[arg-type]
        return output

    config = choose_decode_config(padded(heads.head_dim), item_bytes, has_codes=False)
    work = Work(num_bytes, 4 * heads.num_heads * heads.head_dim * num_seqs * context)
    return Launches(launch, {"config": config, "limits": SPLIT_LIMITS}, work)


def _prefill(heads: Heads, num_seqs: int, length: int, place: Place) -> Launches:
    cache, (sequences,) = _paged(heads, place, num_seqs, 1, length, num_new=length)
    query = _query(heads, place, num_seqs * length)
    output = place.random(num_seqs * length, heads.num_heads * heads.head_dim)
    params = AttentionParams(heads.head_dim**-0.5)

    def launch(_: int, **variant: object) -> Tensor:
        prefill_attention(query, cache, output, sequences, params, **variant)  # type: ignore[arg-type]
        return output

    group, item_bytes = heads.num_heads // heads.num_kv_heads, place.dtype.itemsize
    config = choose_prefill_config(padded(heads.head_dim), item_bytes, group, has_codes=False)
    num_attended = num_seqs * length * (length + 1) / 2
    num_bytes = num_seqs * length * heads.token_bytes(item_bytes)
    return Launches(launch, {"config": config}, Work(num_bytes, 4 * heads.num_heads * heads.head_dim * num_attended))


def _query(heads: Heads, place: Place, num_tokens: int) -> Tensor:
    """[T, H, D] where the fused projection leaves it."""
    return place.random(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)[:, : heads.num_heads]


def _paged(
    heads: Heads, place: Place, num_seqs: int, copies: int, context: int, *, num_new: int
) -> tuple[tuple[Tensor, ...], list[PagedSequences]]:
    """A layer's cache of random values, and in it several batches, whose blocks are in no order."""
    per_seq = -(-context // _BLOCK_SIZE)
    num_blocks = copies * num_seqs * per_seq
    spec = KvCacheSpec((attention_cache(heads.num_kv_heads, heads.head_dim, place.dtype),))
    cache = KvCache(spec, num_blocks, _BLOCK_SIZE, place.device).layers[0]
    for tensor in cache:
        tensor.normal_()
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = tables.to(torch.int32).view(copies, num_seqs, per_seq).to(place.device)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=place.device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=place.device) * num_new
    bound = heads.context_length if num_new == 1 else context
    return cache, [PagedSequences(table, lengths, starts, num_seqs * num_new, num_new, bound) for table in tables]
