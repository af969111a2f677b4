"""How the `cpu` backend lays out a step's attention: buckets of similar lengths, planned once and used by every layer.

A bucket is padded to its longest row, and one call computes it. A mixed step with two decodes A and B, two whole
prompts C and D, and a chunk E after a cached prefix:

    step            A B C C C C D D D E E E

                    queries      keys             (lower case: cached by earlier steps; *: padding)
    CausalBucket    C C C C      C C C C          this step's own, causal
                    D D D *      D D D *
    GatherBucket    E E E        e e e E E E      gathered from the paged cache
    GatherBucket    A            a a a a A        gathered and masked
                    B            b b B * *

A padded key is a masked copy of the first token that the row's own queries see, never another sequence's memory: a NaN
cannot spread between sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache

# Indices into the first dimension of a tensor. A slice costs no copy.
Rows = Tensor | slice
_IntArray = npt.NDArray[np.int64]

# A context is gathered once and then scored by each query. Gathering costs about as much as this many queries.
_GATHER_COST = 7
# A bucket's padding may cost this much, or this fraction of its cost: another bucket's calls would cost more.
_FREE_PADDING = 384 * (_GATHER_COST + 1)
_FREE_PADDING_SHARE = 0.125
# Pieces with fewer queries than this are decodes, or as cheap as decodes.
FEW_QUERIES = 16
# Bounds a bucket's gathered keys and values, so that they stay in the cores' caches.
_MAX_BUCKET_BYTES = 3 * 2**20
# Bounds the size of a mask: a longer prefill over a cached prefix is cut into pieces of this many queries.
_MAX_MASKED_QUERIES = 512
# A prefill longer than its window is cut into pieces as long as the window, but not shorter than this.
_MIN_WINDOWED_QUERIES = 64


@dataclass(frozen=True, slots=True)
class CausalBucket:
    """Whole prompts without a cached prefix, padded at their ends, which no causal query sees."""

    token_rows: Rows
    """num_rows * length tokens of the step; padding repeats a prompt's last token."""
    num_rows: int
    length: int


@dataclass(frozen=True, slots=True)
class GatherBucket:
    """Rows with context read from the paged cache: decodes, or pieces of longer prefills."""

    query_rows: Rows
    """num_rows * num_queries tokens of the step; padding repeats a row's last token."""
    num_rows: int
    num_queries: int
    length: int
    """The longest context, without tokens before a window."""
    slots: Rows
    """num_rows * length slots of the cache."""
    mask: Tensor | None
    """[num_rows, 1, num_queries, length], 0 or -inf; None means that every query sees everything."""
    num_before: int = 0
    """Tokens before the queries of a single piece without a window; otherwise 0."""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The buckets of all layers with the same window."""

    causal: tuple[CausalBucket, ...]
    gathered: tuple[GatherBucket, ...]
    output_rows: Tensor | None
    """[T] int64: each token's row in the buckets' concatenated results; None if they are in order."""


class CpuPlan(AttentionPlan):
    """One step's attention."""

    __slots__ = ("_kv_cache", "_layouts", "_written")

    def __init__(self, metadata: AttentionMetadata, kv_cache: KvCache) -> None:
        super().__init__(metadata)
        self._written: tuple[Tensor | None, Tensor] | None = None
        self._kv_cache = kv_cache
        self._layouts: dict[int | None, AttentionLayout] = {}

    def layout(self, window: int | None = None) -> AttentionLayout:
        """The buckets of layers with `window`, computed once."""
        if window is not None and window >= self.metadata.max_context_len:
            window = None
        if window not in self._layouts:
            self._layouts[window] = _make_layout(self.metadata, self._kv_cache, window)
        return self._layouts[window]

    def written(self) -> tuple[Tensor | None, Tensor]:
        """The tokens that are written to the cache, None for all, and their slots; computed once."""
        if self._written is None:
            self._written = _written(self.metadata.slot_mapping)
        return self._written

    def positions(self) -> Tensor:
        """[T] int64: each token's position in its sequence; -1 for a padded token."""
        metadata = self.metadata
        firsts = metadata.context_lens - metadata.cu_seqlens_q[1:]
        return torch.arange(len(metadata.slot_mapping)) + self._of_each_token(firsts)

    def slots(self, token_rows: slice, positions: Tensor) -> Tensor:
        """The cache slots of `positions` [len(token_rows), n] int64 in the sequences of the tokens `token_rows`."""
        tables, block_size = self.metadata.block_tables, self._kv_cache.block_size
        first_entries = self._of_each_token(torch.arange(len(tables)) * tables.shape[1])[token_rows, None]
        blocks = tables.take(first_entries + positions // block_size)
        return blocks.long() * block_size + positions % block_size

    def _of_each_token(self, values: Tensor) -> Tensor:
        """[T] int64: for each token, its sequence's entry of `values` [num_seqs]."""
        return values.long().repeat_interleave(self.metadata.cu_seqlens_q.diff())


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one sequence, computed together: tokens [start, start + num_queries) of the step."""

    seq: int
    start: int
    num_queries: int
    first_position: int
    """First position that any of the queries sees."""
    context_len: int
    """Tokens from there up to and including the last query."""

    @property
    def cost(self) -> int:
        """Cost of gathering and scoring, in units of one query's score of one token."""
        return (_GATHER_COST + self.num_queries) * self.context_len


def _make_layout(metadata: AttentionMetadata, kv_cache: KvCache, window: int | None) -> AttentionLayout:
    prompts, pieces = _split(metadata, window)
    max_tokens = _MAX_BUCKET_BYTES // _bytes_per_token(kv_cache)
    groups = _in_groups(prompts, max_tokens)
    gather_groups = _in_groups(pieces, max_tokens)
    rows = [_padded_rows(group) for group in groups + gather_groups]
    gathered = [
        _gather_bucket(group, group_rows, metadata.block_tables.numpy(), kv_cache, window)
        for group, group_rows in zip(gather_groups, rows[len(groups) :], strict=True)
    ]
    output_rows = _output_rows(np.concatenate(rows), len(metadata.slot_mapping))
    return AttentionLayout(tuple(map(_causal_bucket, groups, rows)), tuple(gathered), output_rows)


def _written(slot_mapping: Tensor) -> tuple[Tensor | None, Tensor]:
    if bool((slot_mapping >= 0).all()):
        return None, slot_mapping
    rows = (slot_mapping >= 0).nonzero().flatten()
    return rows, slot_mapping[rows]


def _split(metadata: AttentionMetadata, window: int | None) -> tuple[list[_Piece], list[_Piece]]:
    """Split into whole prompts, and pieces that need context from the cache."""
    prompts: list[_Piece] = []
    pieces: list[_Piece] = []
    start = 0
    for seq, (num_queries, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens_host, strict=True)):
        if metadata.is_prefill and num_queries == context_len and (window is None or num_queries <= window):
            prompts.append(_Piece(seq, start, num_queries, 0, context_len))
        else:
            # A padded row has no context. It reads one token, and its result is ignored.
            pieces += _cut(seq, start, num_queries, max(context_len, 1), window)
        start += num_queries
    return prompts, pieces


def _cut(seq: int, start: int, num_queries: int, context_len: int, window: int | None) -> list[_Piece]:
    size = _MAX_MASKED_QUERIES if window is None else min(max(window, _MIN_WINDOWED_QUERIES), _MAX_MASKED_QUERIES)
    pieces = []
    for done in range(0, num_queries, size):
        position = context_len - num_queries + done
        first = 0 if window is None else max(position - window + 1, 0)
        count = min(size, num_queries - done)
        pieces.append(_Piece(seq, start + done, count, first, position + count - first))
    return pieces


class _Group:
    """Pieces padded to a common size, added in order of size, largest first."""

    def __init__(self, piece: _Piece) -> None:
        self.pieces = [piece]
        self._length = piece.context_len
        self._num_queries = piece.num_queries
        self._needed_cost = piece.cost

    def try_add(self, piece: _Piece, max_tokens: int) -> bool:
        """Add `piece` if padding stays cheap and the padded context within `max_tokens`."""
        size = len(self.pieces) + 1
        length, num_queries = max(self._length, piece.context_len), max(self._num_queries, piece.num_queries)
        needed_cost = self._needed_cost + piece.cost
        padding_cost = size * (_GATHER_COST + num_queries) * length - needed_cost
        if padding_cost > max(_FREE_PADDING, _FREE_PADDING_SHARE * needed_cost) or size * length > max_tokens:
            return False
        self.pieces.append(piece)
        self._length, self._num_queries, self._needed_cost = length, num_queries, needed_cost
        return True


def _in_groups(pieces: list[_Piece], max_tokens: int) -> list[list[_Piece]]:
    """Group similar sizes; a piece longer than `max_tokens` is alone."""
    groups: list[_Group] = []
    for piece in sorted(pieces, key=_size, reverse=True):
        if not groups or not groups[-1].try_add(piece, max_tokens):
            groups.append(_Group(piece))
    # Within a group pieces are in the step's order, so that adjacent rows are read without a copy.
    return [sorted(group.pieces, key=lambda piece: piece.start) for group in groups]


def _size(piece: _Piece) -> tuple[int, int, int]:
    # Decodes with equally many drafts sort together. By context length alone, each would be a group among others.
    return min(piece.num_queries, FEW_QUERIES), piece.context_len, piece.num_queries


def _padded_rows(group: list[_Piece]) -> _IntArray:
    """The step's tokens of a group, [len(group) * most queries]; padding repeats a piece's last token."""
    longest = max(piece.num_queries for piece in group)
    starts = np.array([piece.start for piece in group], dtype=np.int64)
    lasts = np.array([piece.num_queries - 1 for piece in group], dtype=np.int64)
    return (starts[:, None] + np.minimum(np.arange(longest), lasts[:, None])).ravel()


def _causal_bucket(group: list[_Piece], token_rows: _IntArray) -> CausalBucket:
    return CausalBucket(_as_rows(token_rows), len(group), len(token_rows) // len(group))


def _gather_bucket(
    group: list[_Piece],
    query_rows: _IntArray,
    block_tables: npt.NDArray[np.int32],
    kv_cache: KvCache,
    window: int | None,
) -> GatherBucket:
    lengths = np.array([piece.context_len for piece in group], dtype=np.int64)
    is_plain = len(group) == 1 and window is None
    slots = _context_slots(group, lengths, block_tables, kv_cache.block_size)
    return GatherBucket(
        query_rows=_as_rows(query_rows),
        num_rows=len(group),
        num_queries=len(query_rows) // len(group),
        length=slots.shape[1],
        slots=_as_rows(slots.ravel()),
        mask=_mask(group, lengths, window, kv_cache.spec.first_tensor.dtype),
        num_before=group[0].context_len - group[0].num_queries if is_plain else 0,
    )


def _context_slots(
    group: list[_Piece], lengths: _IntArray, block_tables: npt.NDArray[np.int32], block_size: int
) -> _IntArray:
    """[num_rows, longest]: slots of each context's tokens, padded with the first one's."""
    longest = int(lengths.max())
    firsts = np.array([piece.first_position for piece in group], dtype=np.int64)
    first_blocks, offsets = np.divmod(firsts, block_size)
    num_blocks = -(-int((offsets + lengths).max()) // block_size)
    # Any block will do after the end of a shorter context: those slots are replaced below.
    columns = np.minimum(first_blocks[:, None] + np.arange(num_blocks), block_tables.shape[1] - 1)
    blocks = block_tables[np.array([piece.seq for piece in group])[:, None], columns].astype(np.int64)
    slots = (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(len(group), -1)
    if offsets.any():
        places = np.minimum(offsets[:, None] + np.arange(longest), slots.shape[1] - 1)
        slots = np.take_along_axis(slots, places, axis=1)
    padded: _IntArray = np.where(np.arange(longest) < lengths[:, None], slots[:, :longest], slots[:, :1])
    return padded


def _mask(group: list[_Piece], lengths: _IntArray, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """[num_rows, 1, most queries, longest]: -inf where a query must not attend; None if all see everything."""
    counts = np.array([piece.num_queries for piece in group])
    num_queries = int(counts.max())
    if num_queries == 1 and lengths.min() == lengths.max():
        return None
    last_seen = (lengths - counts)[:, None] + np.minimum(np.arange(num_queries), counts[:, None] - 1)
    keys = np.arange(lengths.max())
    hidden = keys > last_seen[:, :, None]
    if window is not None:
        hidden |= keys <= last_seen[:, :, None] - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf")).unsqueeze(1)


def _bytes_per_token(kv_cache: KvCache) -> int:
    """Bytes in the layer that stores most."""
    return max(sum(tensor.bytes_per_token for tensor in layer) for layer in kv_cache.spec.layers)


def _as_rows(index: _IntArray) -> Rows:
    """A slice if contiguous: a view instead of a copy in every layer."""
    first, size = int(index[0]), len(index)
    if int(index[-1]) - first == size - 1 and np.array_equal(index, np.arange(first, first + size)):
        return slice(first, first + size)
    return torch.from_numpy(index)


def _output_rows(computed: _IntArray, num_tokens: int) -> Tensor | None:
    """Each token's row among the results for the tokens `computed`; None if token i's row is i.

    A token computed more than once uses its first result; the others are padding.
    """
    if len(computed) == num_tokens and np.array_equal(computed, np.arange(num_tokens)):
        return None
    places = np.zeros(num_tokens, dtype=np.int64)
    # In reverse, because the last assignment to an index wins.
    places[computed[::-1]] = np.arange(len(computed))[::-1]
    return torch.from_numpy(places)
