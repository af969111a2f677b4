"""Matrices made of others' rows or columns, in the format that those have.

Every tensor of a packed matrix has one row for each row of the matrix, but for the order of its columns; a row
has as much for each group of columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from services.worker.ops.matrices import (
    BlockMatrix,
    Fp8Matrix,
    IntMatrix,
    JoinedMatrix,
    Matrix,
    Mxfp4Matrix,
    dense,
    split_order,
)

_IS_JOINED = "only what is about to be multiplied has several formats"


class MatrixFormat(enum.Enum):
    """What a backend may have kernels for. The value is its name in settings and log lines."""

    INT8 = "int8"
    INT4 = "int4"
    MXFP4 = "mxfp4"
    FP8 = "fp8"
    GGUF = "gguf"


def format_of(matrix: Matrix) -> MatrixFormat | None:
    """None for a tensor."""
    if isinstance(matrix, Tensor):
        return None
    if isinstance(matrix, IntMatrix):
        return MatrixFormat.INT8 if matrix.num_bits == 8 else MatrixFormat.INT4
    if isinstance(matrix, BlockMatrix | JoinedMatrix):
        return MatrixFormat.GGUF
    return MatrixFormat.FP8 if isinstance(matrix, Fp8Matrix) else MatrixFormat.MXFP4


def join_rows(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """The rows of matrices with equally many columns, one matrix after the other.

    Packed if all have the same format, with groups of the same size and columns. Otherwise a `JoinedMatrix` if one is
    GGUF's, whose files mix formats in most layers, or else dense, in `dtype`. A single matrix is returned as it is.
    """
    if len(matrices) == 1:
        return matrices[0]
    runs = [list(run) for _, run in groupby(matrices, _layout)]
    if len(runs) == 1 and _have_equal_orders(matrices):
        return _by_row(matrices, _cat)
    if any(isinstance(matrix, BlockMatrix) for matrix in matrices):
        return JoinedMatrix(tuple(join_rows(run, dtype) for run in runs))
    return _cat([dense(matrix, dtype) for matrix in matrices])


def join_columns(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """The columns of matrices with equally many rows, one matrix after the other; none is a `JoinedMatrix`.

    Packed if all have the same format, in whole groups of columns that are in order, or else dense, in `dtype`. A
    single matrix is returned as it is.
    """
    if len(matrices) == 1:
        return matrices[0]
    if len(set(map(_layout, matrices))) == 1 and all(map(_has_whole_groups, matrices)):
        return _by_row(matrices, partial(_cat, dim=1))
    return _cat([dense(matrix, dtype) for matrix in matrices], dim=1)


def take_rows(matrix: Matrix, rows: Tensor) -> Matrix:
    """A new matrix of the rows with the numbers `rows`, int64."""
    return _by_row([matrix], lambda tensors: tensors[0].index_select(0, rows))


def copy_matrix(matrix: Matrix) -> Matrix:
    """A new matrix with the same values, in the same format."""
    return _by_tensor(matrix, Tensor.clone)


def to_device(matrix: Matrix, device: torch.device) -> Matrix:
    """The matrix on `device`."""
    return _by_tensor(matrix, lambda tensor: tensor.to(device))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch's `cat`, which without values imports a compiler first, for seconds."""
    if not tensors[0].is_meta:
        return torch.cat(list(tensors), dim=dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def _layout(matrix: Matrix) -> object:
    """Equal for matrices whose tensors can be joined one by one."""
    if isinstance(matrix, Tensor):
        return matrix.dtype
    values = [getattr(matrix, field.name) for field in fields(matrix)]
    return type(matrix), *(isinstance(value, Tensor) or value for value in values)


def _has_whole_groups(matrix: Matrix) -> bool:
    """Whether other columns can follow: those here are in order, and the last group is as large as the others."""
    if isinstance(matrix, IntMatrix | Fp8Matrix):
        return split_order(matrix)[1] is None and matrix.shape[1] % matrix.group_size == 0
    return True


def _have_equal_orders(matrices: Sequence[Matrix]) -> bool:
    """Whether all have their columns in the same order; their layouts are equal."""
    first, *others = (split_order(matrix)[1] for matrix in matrices)
    return first is None or all(other is not None and torch.equal(first, other) for other in others)


def _by_row(matrices: Sequence[Matrix], make: Callable[[list[Tensor]], Tensor]) -> Matrix:
    """The matrix of which every tensor with rows is made of the matrices' corresponding ones."""
    first = matrices[0]
    assert not isinstance(first, JoinedMatrix), _IS_JOINED
    if isinstance(first, Tensor):
        return make([matrix for matrix in matrices if isinstance(matrix, Tensor)])
    changes: dict[str, Any] = {
        name: make([getattr(matrix, name) for matrix in matrices])
        for name in _tensor_names(first)
        if name != "column_order"
    }
    return replace(first, **changes)


def _by_tensor(matrix: Matrix, make: Callable[[Tensor], Tensor]) -> Matrix:
    """The matrix of which every tensor is made of this one's."""
    assert not isinstance(matrix, JoinedMatrix), _IS_JOINED
    if isinstance(matrix, Tensor):
        return make(matrix)
    changes: dict[str, Any] = {name: make(getattr(matrix, name)) for name in _tensor_names(matrix)}
    return replace(matrix, **changes)


def _tensor_names(matrix: IntMatrix | Fp8Matrix | Mxfp4Matrix | BlockMatrix) -> list[str]:
    return [field.name for field in fields(matrix) if isinstance(getattr(matrix, field.name), Tensor)]
