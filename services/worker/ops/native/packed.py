"""Weight matrices in the form that the kernels read: see kernels/matrix.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.block_types import Levels
from services.worker.ops.matrices import (
    MXFP4_GROUP_SIZE,
    BlockMatrix,
    IntMatrix,
    Matrix,
    Mxfp4Matrix,
    dense,
    in_pairs,
)
from services.worker.ops.native.formats import FORMATS

# The numbers of the enumerations in kernels/matrix.h.
_FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT_KINDS = {8: 2, 4: 3}
_MXFP4_KIND, _IQ4_KIND = 4, 5
# Codes of fewer bits become those of four.
_BLOCK_KINDS = {2: 3, 3: 3, 4: 3, 5: 6, 6: 7}
_ROW_SCALES, _FLOAT32_SCALES, _FLOAT16_SCALES, _POWER_SCALES, _FACTORS, _FACTORS_OF_16 = range(6)
_NO_OFFSETS, _ROW_OFFSETS, _FLOAT32_OFFSETS, _FLOAT16_OFFSETS, _FACTOR_OFFSETS = range(5)

_TILE_ROWS = 32
# Columns that share a scale of the activations; scales of weights change only between such groups.
_GROUP = 32
# The same where a row of weights has one scale.
_ROW_GROUP = 64
# Rows of blocks that are taken apart at once, which bounds the memory for them: a whole number of tiles.
_ROWS_AT_ONCE = 2048

# `Matrix` in kernels/matrix.h.
_matrix = Struct("8q4P").pack


class PackedMatrix:
    """A matrix in tiles, the only copy of it, and the bias of its product."""

    def __init__(self, library: ctypes.CDLL, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Pack `weight`, dense if no kernel takes its groups or their order; `dtype` is float32 or bfloat16."""
        form = _form(weight, dtype)
        self.num_rows, self.num_columns = weight.shape
        self.dtype = dtype
        memory = [form.row_scales, form.row_offsets, None if bias is None else _padded(bias.float())]
        kinds = form.kind, form.scales_kind, form.offsets_kind, FORMATS[dtype]
        head = (*kinds, self.num_rows, self.num_columns, form.group_size, form.zero)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in memory]
        tiles = torch.empty(library.ls_tiles_bytes(_matrix(*head, 0, *addresses)), dtype=torch.uint8)
        # The kernels are given the address of this structure, which has those of the tensors.
        self._fields = ctypes.create_string_buffer(_matrix(*head, tiles.data_ptr(), *addresses))
        self._memory = (tiles, *memory)
        self.address = ctypes.addressof(self._fields)
        pack = library.ls_pack
        first_tile = 0
        for part in form.parts:
            addresses = [
                0 if tensor is None else tensor.data_ptr() for tensor in (part.values, part.scales, part.offsets)
            ]
            counts = first_tile, len(part.values)
            pack(*map(ctypes.c_void_p, (self.address, *addresses)), *map(ctypes.c_int64, counts))
            first_tile += len(part.values) // _TILE_ROWS


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of rows, contiguous: `Source` in kernels/pack.cpp."""

    values: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    """float32; None where there are none, where rows have one each, and where `scales` has them."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A matrix as `ls_pack` takes it."""

    kind: int
    parts: Iterable[_Part]
    """All but the last have whole tiles."""
    scales_kind: int = _ROW_SCALES
    group_size: int = _GROUP
    zero: int = 0
    offsets_kind: int = _NO_OFFSETS
    row_scales: Tensor | None = None
    row_offsets: Tensor | None = None


def _form(weight: Matrix, dtype: torch.dtype) -> _Form:
    if isinstance(weight, BlockMatrix):
        if weight.block_type.num_bits < 8:
            return _block_form(weight)
        weight = weight.to_integers()
    if isinstance(weight, Mxfp4Matrix):
        # The kernels multiply by twice the values, which are integers.
        part = _Part(weight.codes.contiguous(), weight.exponents.contiguous())
        return _Form(_MXFP4_KIND, [part], _POWER_SCALES, MXFP4_GROUP_SIZE)
    if isinstance(weight, IntMatrix) and weight.column_order is None:
        has_row_scales = weight.group_size >= weight.shape[1]
        if has_row_scales or weight.group_size % _GROUP == 0:
            return _row_form(weight) if has_row_scales else _group_form(weight)
    return _Form(_FLOAT_KINDS[dtype], [_Part(dense(weight, dtype).contiguous())])


def _row_form(weight: IntMatrix) -> _Form:
    return _Form(
        _INT_KINDS[weight.num_bits],
        [_Part(weight.codes.contiguous())],
        _ROW_SCALES,
        -(-weight.shape[1] // _ROW_GROUP) * _ROW_GROUP,
        zero=8,
        offsets_kind=_NO_OFFSETS if weight.offsets is None else _ROW_OFFSETS,
        row_scales=_padded(weight.scales.flatten()),
        row_offsets=None if weight.offsets is None else _padded(weight.offsets.flatten()),
    )


def _group_form(weight: IntMatrix) -> _Form:
    scales = weight.scales.contiguous()
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    return _Form(
        _INT_KINDS[weight.num_bits],
        [_Part(weight.codes.contiguous(), scales, offsets)],
        _narrowest(scales),
        weight.group_size,
        zero=8,
        offsets_kind=_NO_OFFSETS if offsets is None else _FLOAT32_OFFSETS,
    )


def _block_form(weight: BlockMatrix) -> _Form:
    block_type = weight.block_type
    # What a row has shows the forms of all.
    row = block_type.split(weight.blocks[:1])
    scales_kind, offsets_kind = _FLOAT16_SCALES, _FLOAT16_OFFSETS
    if row.scales.units is not None:
        scales_kind = _FACTORS if block_type.group_size == _GROUP else _FACTORS_OF_16
        offsets_kind = _FACTOR_OFFSETS
    return _Form(
        _BLOCK_KINDS[block_type.num_bits] if block_type.table is None else _IQ4_KIND,
        _block_parts(weight),
        scales_kind,
        block_type.group_size,
        zero=block_type.zero,
        offsets_kind=_NO_OFFSETS if row.offsets is None else offsets_kind,
    )


def _block_parts(weight: BlockMatrix) -> Iterator[_Part]:
    for first in range(0, len(weight.blocks), _ROWS_AT_ONCE):
        parts = weight.block_type.split(weight.blocks[first : first + _ROWS_AT_ONCE])
        values = in_pairs(parts.codes) if weight.block_type.num_bits <= 4 else parts.codes
        levels = [parts.scales] if parts.offsets is None else [parts.scales, parts.offsets]
        if parts.scales.units is None:
            yield _Part(values, *(each.values.float() for each in levels))
        else:
            yield _Part(values, torch.cat([_factors_by_tile(each) for each in levels], dim=2))


def _narrowest(scales: Tensor) -> int:
    """float16 where that is exact, as it is for the scales of most checkpoints."""
    return _FLOAT16_SCALES if torch.equal(scales.half().float(), scales) else _FLOAT32_SCALES


def _padded(values: Tensor) -> Tensor:
    """[N, ...] with zeros up to a whole number of tiles; always a new tensor."""
    rows = -len(values) % _TILE_ROWS
    return F.pad(values, (*[0, 0] * (values.dim() - 1), 0, rows)).clone(memory_format=torch.contiguous_format)


def _by_tile(levels: Tensor) -> Tensor:
    """[N, groups] to [tiles, groups, 32]."""
    return _padded(levels).view(-1, _TILE_ROWS, levels.shape[1]).transpose(1, 2).contiguous()


def _factors_by_tile(levels: Levels) -> Tensor:
    """[tiles, blocks, bytes] uint8: the units' bytes, and then the factors'."""
    assert levels.units is not None
    units, factors = _by_tile(levels.units), _by_tile(levels.values)
    return torch.cat([part.view(torch.uint8).view(*units.shape[:2], -1) for part in (units, factors)], dim=2)
