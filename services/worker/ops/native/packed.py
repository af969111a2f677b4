"""Weight matrices in the form that the kernels read: see kernels/matrix.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.matrices import MXFP4_GROUP_SIZE, IntMatrix, Matrix, Mxfp4Matrix, dense
from services.worker.ops.native.formats import FORMATS

# The numbers of the enumerations in kernels/matrix.h.
_FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT_KINDS = {8: 2, 4: 3}
_MXFP4_KIND = 4
_ROW_SCALES, _FLOAT32_SCALES, _FLOAT16_SCALES, _POWER_SCALES = range(4)

_TILE_ROWS = 32
# Columns that share a scale of the activations; scales of weights change only between such groups.
_GROUP = 32
# The same where a row of weights has one scale.
_ROW_GROUP = 64

# `Matrix` in kernels/matrix.h.
_matrix = Struct("6q4P").pack


class PackedMatrix:
    """A matrix in tiles, the only copy of it, and the bias of its product."""

    def __init__(self, library: ctypes.CDLL, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Pack `weight`, dense if there are no kernels for its groups; `dtype` is float32 or bfloat16."""
        form = _form(weight, dtype)
        self.num_rows, self.num_columns = weight.shape
        self.dtype = dtype
        offsets = None if form.offsets is None else _by_tile(form.offsets)
        row_scales = _padded(form.scales.flatten()) if form.scales_kind == _ROW_SCALES else None
        memory = [row_scales, offsets, None if bias is None else _padded(bias.float())]
        head = (form.kind, form.scales_kind, FORMATS[dtype], self.num_rows, self.num_columns, form.group_size)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in memory]
        tiles = torch.empty(library.ls_tiles_bytes(_matrix(*head, 0, *addresses)), dtype=torch.uint8)
        # The kernels are given the address of this structure, which has those of the tensors.
        self._fields = ctypes.create_string_buffer(_matrix(*head, tiles.data_ptr(), *addresses))
        self._memory = (tiles, *memory)
        self.address = ctypes.addressof(self._fields)
        values, scales = form.values.contiguous(), form.scales.contiguous()
        library.ls_pack(*map(ctypes.c_void_p, (self.address, values.data_ptr(), scales.data_ptr())))


@dataclass(frozen=True, slots=True)
class _Form:
    """A matrix as `ls_pack` takes it."""

    kind: int
    values: Tensor
    scales: Tensor
    scales_kind: int = _ROW_SCALES
    group_size: int = _GROUP
    offsets: Tensor | None = None


def _form(weight: Matrix, dtype: torch.dtype) -> _Form:
    if isinstance(weight, Mxfp4Matrix):
        # The kernels multiply by twice the values, which are integers.
        return _Form(_MXFP4_KIND, weight.codes, weight.exponents, _POWER_SCALES, MXFP4_GROUP_SIZE)
    if isinstance(weight, IntMatrix):
        has_row_scales = weight.group_size >= weight.shape[1]
        if has_row_scales or weight.group_size % _GROUP == 0:
            group_size = -(-weight.shape[1] // _ROW_GROUP) * _ROW_GROUP if has_row_scales else weight.group_size
            kind = _ROW_SCALES if has_row_scales else _narrowest(weight.scales)
            return _Form(_INT_KINDS[weight.num_bits], weight.codes, weight.scales, kind, group_size, weight.offsets)
    values = dense(weight, dtype)
    return _Form(_FLOAT_KINDS[dtype], values, torch.empty(0))


def _narrowest(scales: Tensor) -> int:
    """float16 where that is exact, as it is for the scales of most checkpoints."""
    return _FLOAT16_SCALES if torch.equal(scales.half().float(), scales) else _FLOAT32_SCALES


def _padded(values: Tensor) -> Tensor:
    """[N, ...] with zeros up to a whole number of tiles; always a new tensor."""
    rows = -len(values) % _TILE_ROWS
    return F.pad(values, (*[0, 0] * (values.dim() - 1), 0, rows)).clone(memory_format=torch.contiguous_format)


def _by_tile(offsets: Tensor) -> Tensor:
    """[N, groups] to [tiles, groups, 32]."""
    return _padded(offsets).view(-1, _TILE_ROWS, offsets.shape[1]).transpose(1, 2).contiguous()
