"""Weight matrices in the form that the kernels read: see kernels/matrix.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
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
from services.worker.ops.prepared import Keep, KeptError, Prepared, make_anew

# The numbers of the enumerations in kernels/matrix.h.
_FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT_KINDS = {8: 2, 4: 3}
_MXFP4_KIND, _IQ4_KIND = 4, 5
# Codes of fewer bits become those of four.
_BLOCK_KINDS = {2: 3, 3: 3, 4: 3, 5: 6, 6: 7}
_ROW_SCALES, _FLOAT32_SCALES, _FLOAT16_SCALES, _POWER_SCALES, _FACTORS, _FACTORS_OF_16 = range(6)
_NO_OFFSETS, _ROW_OFFSETS, _FLOAT32_OFFSETS, _FLOAT16_OFFSETS, _FACTOR_OFFSETS = range(5)
# How many there are: of kinds, scales, offsets, and formats of activations.
_NUM_KINDS = 8, 6, 5, 2

_TILE_ROWS = 32
# Columns that share a scale of the activations; scales of weights change only between such groups.
_GROUP = 32
# The same where a row of weights has one scale.
_ROW_GROUP = 64
# Rows of blocks that are taken apart at once, which bounds the memory for them: a whole number of tiles.
_ROWS_AT_ONCE = 2048

# `Matrix` in kernels/matrix.h.
_matrix = Struct("8q4P").pack
_NUM_FIELDS, _NUM_TENSORS = 8, 4


class PackedMatrix:
    """A matrix in tiles, the only copy of it, and the bias of its product."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Matrix,
        bias: Tensor | None,
        dtype: torch.dtype,
        keep: Keep = make_anew,
    ) -> None:
        """Pack `weight`, dense if no kernel takes its groups or their order, unless `keep` has it packed.

        Args:
            dtype: float32 or bfloat16.

        Raises:
            KeptError: what `keep` has is another matrix.
        """
        kept = keep(lambda: _pack(library, weight, bias, dtype))
        self.num_rows, self.num_columns = weight.shape
        self.dtype = dtype
        _check(library, kept, (self.num_rows, self.num_columns), dtype)
        # The kernels are given the address of this structure, which has those of the tensors.
        self._fields = ctypes.create_string_buffer(_matrix(*kept.numbers, *_addresses(kept.tensors)))
        self._memory = kept.tensors
        self.address = ctypes.addressof(self._fields)


def _pack(library: ctypes.CDLL, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Prepared:
    """The numbers at the head of `Matrix` in kernels/matrix.h; tiles, scales of rows, their offsets and the bias."""
    form = _form(weight, dtype)
    memory = [form.row_scales, form.row_offsets, None if bias is None else _padded(bias.float())]
    kinds = form.kind, form.scales_kind, form.offsets_kind, FORMATS[dtype]
    head = (*kinds, *weight.shape, form.group_size, form.zero)
    tiles = torch.empty(library.ls_tiles_bytes(_matrix(*head, 0, *_addresses(memory))), dtype=torch.uint8)
    fields = ctypes.create_string_buffer(_matrix(*head, *_addresses([tiles, *memory])))
    first_tile = 0
    for part in form.parts:
        addresses = ctypes.addressof(fields), *_addresses([part.values, part.scales, part.offsets])
        counts = first_tile, len(part.values)
        library.ls_pack(*map(ctypes.c_void_p, addresses), *map(ctypes.c_int64, counts))
        first_tile += len(part.values) // _TILE_ROWS
    return Prepared(head, (tiles, *memory))


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check(library: ctypes.CDLL, kept: Prepared, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Check that no kernel can read beyond the memory of a matrix.

    Raises:
        KeptError: it is none of this shape, or has other sizes.
    """
    if len(kept.numbers) != _NUM_FIELDS or len(kept.tensors) != _NUM_TENSORS:
        raise KeptError("no matrix")
    *kinds, num_rows, num_columns, group_size, _ = kept.numbers
    are_known = all(0 <= kind < count for kind, count in zip(kinds, _NUM_KINDS, strict=True))
    if not are_known or (num_rows, num_columns) != shape or kinds[-1] != FORMATS[dtype] or group_size < 1:
        raise KeptError(f"another matrix than {list(shape)} {dtype}")
    _, scales_kind, offsets_kind, _ = kinds
    tiles, *rows = kept.tensors
    is_needed = scales_kind == _ROW_SCALES and kinds[0] not in _FLOAT_KINDS.values(), offsets_kind == _ROW_OFFSETS
    num_padded = -(-num_rows // _TILE_ROWS) * _TILE_ROWS
    have_sizes = all(each is None or (each.dtype is torch.float32 and len(each) == num_padded) for each in rows)
    has_all = all(tensor is not None or not needed for tensor, needed in zip(rows, is_needed, strict=False))
    num_bytes = library.ls_tiles_bytes(_matrix(*kept.numbers, *[0] * _NUM_TENSORS))
    if tiles is None or tiles.dtype is not torch.uint8 or len(tiles) != num_bytes or not have_sizes or not has_all:
        raise KeptError("sizes that are not the matrix's")


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
