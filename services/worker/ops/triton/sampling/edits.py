"""Applies masks and sparse edits to logits on the device, in place: what `RowEdits.apply` computes.

In this order: grammar masks, bans, biases, repetition penalties, presence and frequency penalties. One launch per kind
of edit, since a token may have several.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.drawing.row_edits import RowEdits
from services.worker.forward.staging import to_device

_TILE = 2048
_EDITS_PER_PROGRAM = 256
_NUM_WARPS = 4
# A kernel must not be compiled again because these have other values, or begin at other addresses.
_PER_STEP = ("num_edits",)
_COLUMNS = ("rows", "words", "token_ids", "kinds", "values")
_MAX_FLOAT = tl.constexpr(3.4028234663852886e38)


class EditKind(enum.IntEnum):
    """What an edit does to a logit; kinds are applied in ascending order."""

    FORBID = 0
    """Sets it to -Inf, unless the row's bans would leave nothing above -Inf: then none of them applies."""
    BIAS = 1
    """Adds the value."""
    REPETITION = 2
    """Divides a positive logit by the value and multiplies others; in float64, and finite ones stay finite."""
    PENALTY = 3
    """Adds the value: the negated penalty."""


_FORBID, _REPETITION = tl.constexpr(EditKind.FORBID.value), tl.constexpr(EditKind.REPETITION.value)


@dataclass(frozen=True, slots=True)
class AllowMasks:
    """Which tokens the grammars of some rows allow; see `GrammarMatcher.mask`."""

    rows: Tensor  # [M] int32, no repeats; -1 for padding
    words: Tensor  # [M, ceil(vocabulary / 32)] int32: bit i of word w is token 32 w + i


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of single logits as columns, in any order; no two have the same row, token and kind."""

    rows: Tensor  # [N] int32; -1 for padding
    token_ids: Tensor  # [N] int32
    kinds: Tensor  # [N] int32, `EditKind`
    values: Tensor  # [N] float32; ignored for bans


@triton.jit
def _allowed(words, mask, tile, num_columns, num_words, TILE: tl.constexpr):
    """The columns of a tile, and which of them the mask allows: [TILE]."""
    columns = tile * TILE + tl.arange(0, TILE)
    word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    packed = tl.load(words + mask.to(tl.int64) * num_words + word, mask=word < num_words, other=0)
    bits = (packed[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return columns, (tl.reshape(bits, [TILE]) != 0) & (columns < num_columns)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _find_allowed_kernel(logits, row_stride, rows, words, found, num_columns, num_words, TILE: tl.constexpr):
    """For each tile: 2 if an allowed token is possible, 1 if one is allowed, else 0."""
    mask, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + mask).to(tl.int64)
    if row >= 0:
        columns, is_allowed = _allowed(words, mask, tile, num_columns, num_words, TILE)
        x = tl.load(logits + row * row_stride + columns, mask=is_allowed, other=float("-inf"))
        here = tl.max(tl.where(x > float("-inf"), 2, is_allowed.to(tl.int32)))
        tl.store(found + mask * tl.num_programs(1) + tile, here)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _mask_kernel(
    logits, row_stride, rows, words, found, num_columns, num_words, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Forbid what is not allowed. Where all that is allowed is impossible, it becomes equally likely."""
    mask, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + mask).to(tl.int64)
    if row >= 0:
        tiles = tl.arange(0, TILES)
        most = tl.max(tl.load(found + mask * num_tiles + tiles, mask=tiles < num_tiles, other=0))
        columns, is_allowed = _allowed(words, mask, tile, num_columns, num_words, TILE)
        is_column = columns < num_columns
        if most == 2:
            forbidden = tl.full([TILE], float("-inf"), tl.float32)
            tl.store(logits + row * row_stride + columns, forbidden, mask=is_column & (is_allowed == 0))
        if most == 1:
            tl.store(logits + row * row_stride + columns, tl.where(is_allowed, 0.0, float("-inf")), mask=is_column)


@triton.jit
def _edits(rows, token_ids, kinds, num_edits, kind, EDITS: tl.constexpr):
    """Indexes, rows and tokens of one program's edits, and which of them are of this kind."""
    edits = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    row = tl.load(rows + edits, mask=edits < num_edits, other=-1).to(tl.int64)
    is_meant = (row >= 0) & (tl.load(kinds + edits, mask=edits < num_edits, other=-1) == kind)
    return edits, row, tl.load(token_ids + edits, mask=is_meant, other=0), is_meant


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_COLUMNS)
def _forbid_kernel(logits, row_stride, rows, token_ids, kinds, num_edits, before, has_bans, EDITS: tl.constexpr):
    edits, row, token_id, is_ban = _edits(rows, token_ids, kinds, num_edits, _FORBID, EDITS)
    places = logits + row * row_stride + token_id
    tl.store(before + edits, tl.load(places, mask=is_ban, other=0.0), mask=is_ban)
    tl.store(places, tl.full([EDITS], float("-inf"), tl.float32), mask=is_ban)
    tl.store(has_bans + row, tl.full([EDITS], 1, tl.int32), mask=is_ban)


@triton.jit
def _find_left_kernel(logits, row_stride, has_bans, is_left, num_columns, TILE: tl.constexpr):
    """For each tile of rows with bans: 1 if a token is still possible."""
    row, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(has_bans + row) != 0:
        columns = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row.to(tl.int64) * row_stride + columns, mask=columns < num_columns, other=float("-inf"))
        tl.store(is_left + row * tl.num_programs(1) + tile, tl.max((x > float("-inf")).to(tl.int32)))


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_COLUMNS)
def _restore_kernel(
    logits, row_stride, rows, token_ids, kinds, num_edits, before, is_left, num_tiles, EDITS: tl.constexpr
):
    """Undo the bans of rows in which no token is left."""
    edits, row, token_id, is_ban = _edits(rows, token_ids, kinds, num_edits, _FORBID, EDITS)
    any_left = tl.full([EDITS], 0, tl.int32)
    for tile in range(num_tiles):
        any_left |= tl.load(is_left + row * num_tiles + tile, mask=is_ban, other=1)
    is_undone = is_ban & (any_left == 0)
    values = tl.load(before + edits, mask=is_undone, other=0.0)
    tl.store(logits + row * row_stride + token_id, values, mask=is_undone)


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_COLUMNS)
def _change_kernel(
    logits, row_stride, rows, token_ids, kinds, num_edits, values, KIND: tl.constexpr, EDITS: tl.constexpr
):
    edits, row, token_id, is_meant = _edits(rows, token_ids, kinds, num_edits, KIND, EDITS)
    places = logits + row * row_stride + token_id
    x = tl.load(places, mask=is_meant, other=0.0)
    value = tl.load(values + edits, mask=is_meant, other=1.0)
    if KIND == _REPETITION:
        exact, penalty = x.to(tl.float64), value.to(tl.float64)
        changed = tl.where(x > 0, exact / penalty, exact * penalty)
        # A row without a finite entry would have no token to draw.
        bounded = tl.minimum(tl.maximum(changed, -_MAX_FLOAT), _MAX_FLOAT).to(tl.float32)
        x = tl.where(x > float("-inf"), bounded, x)
    else:
        x += value
    tl.store(places, x, mask=is_meant)


def apply_masks(logits: Tensor, masks: AllowMasks) -> None:
    """Forbid what the masks of some rows do not allow, in place.

    If all that a mask allows is -Inf, its tokens become 0, so equally likely; a mask that allows nothing is ignored.

    Args:
        logits: [B, vocabulary] float32, rows contiguous.
        masks: Of at least one row.
    """
    num_columns, num_masks = logits.shape[1], len(masks.rows)
    num_tiles = triton.cdiv(num_columns, _TILE)
    found = torch.empty(num_masks, num_tiles, dtype=torch.int32, device=logits.device)
    arguments = logits, logits.stride(0), masks.rows, masks.words, found, num_columns, masks.words.shape[1]
    grid = num_masks, num_tiles
    _find_allowed_kernel[grid](*arguments, TILE=_TILE, num_warps=_NUM_WARPS)
    _mask_kernel[grid](*arguments, num_tiles, TILES=triton.next_power_of_2(num_tiles), TILE=_TILE, num_warps=_NUM_WARPS)


def apply_edits(logits: Tensor, edits: Edits) -> None:
    """Change single logits, kind after kind (see `EditKind`), in place.

    Args:
        logits: [B, vocabulary] float32, rows contiguous, masks already applied.
        edits: At least one; padding counts.
    """
    num_rows, num_columns = logits.shape
    num_edits, num_tiles = len(edits.rows), triton.cdiv(num_columns, _TILE)
    before = torch.empty(num_edits, dtype=torch.float32, device=logits.device)
    has_bans = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    is_left = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    target = logits, logits.stride(0)
    columns = edits.rows, edits.token_ids, edits.kinds, num_edits
    grid = (triton.cdiv(num_edits, _EDITS_PER_PROGRAM),)
    options = {"EDITS": _EDITS_PER_PROGRAM, "num_warps": _NUM_WARPS}
    _forbid_kernel[grid](*target, *columns, before, has_bans, **options)
    _find_left_kernel[(num_rows, num_tiles)](*target, has_bans, is_left, num_columns, TILE=_TILE, num_warps=_NUM_WARPS)
    _restore_kernel[grid](*target, *columns, before, is_left, num_tiles, **options)
    for kind in (EditKind.BIAS, EditKind.REPETITION, EditKind.PENALTY):
        _change_kernel[grid](*target, *columns, edits.values, KIND=kind.value, **options)


def edit_logits(logits: Tensor, edits: Sequence[RowEdits]) -> None:
    """See `Ops.edit_logits`. Columns of all rows' edits are made on the host and copied once."""
    masks = [(row, row_edits.allowed) for row, row_edits in enumerate(edits) if row_edits.allowed is not None]
    if masks:
        apply_masks(logits, _pack_masks(masks, logits.device))
    columns = _pack_edits(edits, logits.device)
    if columns is not None:
        apply_edits(logits, columns)


def _pack_masks(masks: Sequence[tuple[int, npt.NDArray[np.bool_]]], device: torch.device) -> AllowMasks:
    allowed = np.stack([mask for _, mask in masks])
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    rows = np.array([row for row, _ in masks], np.int32)
    return AllowMasks(to_device(rows, device), to_device(words, device))


def _pack_edits(edits: Sequence[RowEdits], device: torch.device) -> Edits | None:
    """The edits other than masks; None if there are none."""
    parts = [part for row, row_edits in enumerate(edits) for part in _parts_of(row, row_edits) if len(part[2])]
    if not parts:
        return None
    lengths = [len(token_ids) for _, _, token_ids, _ in parts]
    rows = np.repeat(np.array([row for row, *_ in parts], np.int32), lengths)
    kinds = np.repeat(np.array([kind for _, kind, *_ in parts], np.int32), lengths)
    token_ids = np.concatenate([token_ids for _, _, token_ids, _ in parts]).astype(np.int32)
    values = np.concatenate([np.broadcast_to(values, len(ids)) for *_, ids, values in parts]).astype(np.float32)
    return Edits(*(to_device(column, device) for column in (rows, token_ids, kinds, values)))


def _parts_of(row: int, edits: RowEdits) -> Iterator[tuple[int, EditKind, npt.NDArray[np.int64], npt.ArrayLike]]:
    """One row's edits kind by kind: row, kind, token ids, and a value for each or for all."""
    yield row, EditKind.FORBID, edits.banned_ids, 0.0
    yield row, EditKind.BIAS, edits.bias_ids, edits.biases
    yield row, EditKind.REPETITION, edits.repeated_ids, edits.repetition_penalty
    yield row, EditKind.PENALTY, edits.drawn_ids, -edits.penalties
