"""What a bad file may have in place of a tensor: other sizes, other numbers, and contents that no program wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

Damage = Callable[[Tensor], Tensor]

_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64),
)


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.float().to(dtype)


SHAPES: Mapping[str, Damage] = {
    "empty": lambda tensor: tensor.new_empty(0),
    "without rows": lambda tensor: tensor[:0],
    "without the last row": lambda tensor: tensor[:-1],
    "without the last column": lambda tensor: tensor[..., :-1],
    "with one more row": lambda tensor: torch.cat((tensor, tensor[-1:])),
    "with one more column": lambda tensor: torch.cat((tensor, tensor[..., -1:]), dim=-1),
    "transposed": lambda tensor: tensor.transpose(0, -1),
    "in one dimension": lambda tensor: tensor.flatten(),
    "in one more dimension": lambda tensor: tensor[None],
}
"""For tensors of at least one dimension."""

DTYPES: Mapping[str, Damage] = {
    **{f"as {dtype}": partial(_to, dtype) for dtype in _DTYPES},
    "as bytes": lambda tensor: _bytes(tensor).view(*tensor.shape[:-1], -1),
}

CONTENTS: Mapping[str, Damage] = {
    "zeros": torch.zeros_like,
    "all bits set": lambda tensor: _from_bytes(tensor, lambda num: torch.full((num,), 0xFF)),
    "random bits": lambda tensor: _from_bytes(tensor, _random_bytes),
    "the largest numbers": lambda tensor: torch.full_like(tensor, _limits(tensor).max),
    "the lowest numbers": lambda tensor: torch.full_like(tensor, _limits(tensor).min),
    "one larger": lambda tensor: (tensor.float() + 1).to(tensor.dtype),
}

FLOAT_CONTENTS: Mapping[str, Damage] = {
    "NaN": lambda tensor: torch.full_like(tensor, torch.nan),
    "infinite": lambda tensor: torch.full_like(tensor, torch.inf),
    "the smallest numbers": lambda tensor: torch.full_like(tensor, torch.finfo(tensor.dtype).smallest_normal / 4),
}
"""For tensors of 16 bits and more."""


def damages(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What each damage makes of `tensor`, contiguous; without those that leave shape, dtype and bits as they are."""
    wanted = {**(SHAPES if tensor.dim() else {}), **DTYPES, **contents(tensor)}
    for name, damage in wanted.items():
        damaged = damage(tensor).contiguous()
        if not _are_same(damaged, tensor):
            yield name, damaged


def contents(tensor: Tensor) -> Mapping[str, Damage]:
    """The damages that leave the shape and dtype of `tensor`."""
    has_infinities = tensor.is_floating_point() and tensor.itemsize > 1
    return {**CONTENTS, **FLOAT_CONTENTS} if has_infinities else CONTENTS


def _are_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(tensor: Tensor, make: Callable[[int], Tensor]) -> Tensor:
    return make(tensor.nbytes).to(torch.uint8).view(tensor.dtype).view(tensor.shape)


def _random_bytes(num_bytes: int) -> Tensor:
    return torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(num_bytes))


def _limits(tensor: Tensor) -> torch.finfo | torch.iinfo:
    return torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
