"""Tensors and matrices as JSON, with or without their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from services.worker.ops.block_types import BLOCK_TYPES, BlockType
from services.worker.ops.matrices import BlockMatrix, Fp8Matrix, IntMatrix, Matrix, Mxfp4Matrix

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)
}
_CLASSES: Mapping[str, type[Any]] = {each.__name__: each for each in (IntMatrix, Mxfp4Matrix, Fp8Matrix, BlockMatrix)}
_BLOCK_TYPES: Mapping[str, BlockType] = {each.name: each for each in BLOCK_TYPES.values()}
# What a layer needs the values of, though it packs the rest.
_READ_FIELDS = ("column_order",)

Append = Callable[[Tensor], int]
"""Keeps a tensor's values; returns their place."""
ReadAt = Callable[[int, torch.dtype, list[int]], Tensor]
"""The values at a place, which may be written to by nobody."""


def describe_tensor(tensor: Tensor, append: Append) -> list[Any]:
    """A tensor with its values."""
    return [*_without_values(tensor), append(tensor)]


def read_tensor(description: list[Any], read_at: ReadAt) -> Tensor:
    """The tensor of a description, with its values if it has them."""
    name, shape, *place = description
    dtype = _DTYPES[name]
    return read_at(place[0], dtype, shape) if place else torch.empty(shape, dtype=dtype, device="meta")


def describe_matrix(matrix: Matrix, append: Append) -> list[Any]:
    """A matrix of which only shapes and formats are kept: its values are packed."""
    if isinstance(matrix, Tensor):
        return ["Tensor", _without_values(matrix)]
    return [type(matrix).__name__, {each.name: _describe(each.name, matrix, append) for each in fields(matrix)}]


def read_matrix(description: list[Any], read_at: ReadAt) -> Matrix:
    """The matrix of a description; its tensors have no values, but for the order of its columns."""
    name, content = description
    if name == "Tensor":
        return read_tensor(content, read_at)
    matrix: Matrix = _CLASSES[name](**{field: _read(value, read_at) for field, value in content.items()})
    return matrix


def _describe(field: str, matrix: Matrix, append: Append) -> Any:
    value = getattr(matrix, field)
    if isinstance(value, Tensor):
        return describe_tensor(value, append) if field in _READ_FIELDS else _without_values(value)
    return value.name if isinstance(value, BlockType) else value


def _read(value: Any, read_at: ReadAt) -> Any:
    if isinstance(value, list):
        return read_tensor(value, read_at)
    return _BLOCK_TYPES[value] if isinstance(value, str) else value


def _without_values(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
