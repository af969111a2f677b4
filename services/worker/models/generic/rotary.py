"""Rotations by position that modelling code asks for, computed by the backend on CPUs.

transformers has a function for them in each of its modelling files. `register` puts one of ours in its place, which
calls it wherever no step of ours is running, and for all that `Ops.rope` does not compute: the function is tried on
random values, and a step's cosines are looked at, which on a GPU would wait for it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from services.worker.models.generic.one_op import CODE_ERRORS, tolerance_of
from services.worker.ops import Ops, RopeRows

Rotate = Callable[..., tuple[Tensor, Tensor]]

# A function of query and key [1, heads, T, D], cosines and sines [1, T, rotary_dim], whose results are rotated.
_NAME = "apply_rotary_pos_emb"
_ARGUMENTS = ("q", "k", "cos", "sin")
_SEED = 1
_NUM_TOKENS = 5
_NUM_HEADS = 3
_ROTARY_DIM = 8


class Rotations:
    """The rotations of a model's steps."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._form_of: dict[tuple[Rotate, torch.dtype, torch.dtype, bool], bool | None] = {}
        self._made: tuple[Tensor, Tensor, bool, RopeRows | None] | None = None

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Compute those of the body."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._made = None

    def try_rotate(self, own: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        """What `own` computes; None if the op does not."""
        if not _fit(q, k, cos, sin):
            return None
        key = own, q.dtype, cos.dtype, cos.shape[-1] < q.shape[-1]
        if key not in self._form_of:
            self._form_of[key] = self._find_form(*key)
        is_interleaved = self._form_of[key]
        rows = None if is_interleaved is None else self._rows(cos, sin, is_interleaved)
        return None if rows is None else (self._rotate(q, rows), self._rotate(k, rows))

    def _rows(self, cos: Tensor, sin: Tensor, is_interleaved: bool) -> RopeRows | None:
        """What the op needs, once for all layers; None if the halves of the columns differ."""
        made = self._made
        if made is None or made[0] is not cos or made[1] is not sin or made[2] is not is_interleaved:
            made = self._made = cos, sin, is_interleaved, _make_rows(self._ops, cos, sin, is_interleaved)
        return made[3]

    def _rotate(self, heads: Tensor, rows: RopeRows) -> Tensor:
        """[1, heads, T, D] to a new tensor, in which a token's heads are side by side in memory."""
        tokens = heads[0].transpose(0, 1)
        rotated = torch.empty(tokens.shape, dtype=tokens.dtype, device=tokens.device).copy_(tokens)
        self._ops.rope(rotated, rows)
        return rotated.transpose(0, 1)[None]

    def _find_form(self, own: Rotate, dtype: torch.dtype, factor_dtype: torch.dtype, is_partial: bool) -> bool | None:
        """Which columns are rotated with each other, see `Ops.prepare_rope`; None if it is not such a rotation."""
        generator = torch.Generator().manual_seed(_SEED)
        head_dim = (1 + is_partial) * _ROTARY_DIM
        shapes = (_NUM_HEADS, _NUM_TOKENS, head_dim), (1, _NUM_TOKENS, head_dim), (_NUM_TOKENS, _ROTARY_DIM // 2)
        q, k, angles = (torch.randn((1, *each), generator=generator, dtype=torch.float32) for each in shapes)
        # With a factor, as some scalings of positions have one.
        halves = angles.cos() * 1.25, angles.sin() * 1.25
        cos, sin = (torch.cat([each, each], dim=-1).to(factor_dtype) for each in halves)
        q, k = q.to(dtype), k.to(dtype)
        try:
            found = own(q.clone(), k.clone(), cos.clone(), sin.clone())
        except CODE_ERRORS:
            return None
        if not isinstance(found, tuple) or len(found) != len((q, k)):
            return None
        for is_interleaved in (False, True):
            rows = _make_rows(self._ops, cos, sin, is_interleaved)
            assert rows is not None, "the halves are equal"
            if all(_are_alike(one, self._rotate(each, rows)) for one, each in zip(found, (q, k), strict=True)):
                return is_interleaved
        return None


_current: ContextVar[Rotations | None] = ContextVar("rotations of the running forward pass", default=None)


def register(model: nn.Module) -> None:
    """Put ours in the place of the functions of a model's modelling files; repeated calls change nothing."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules.get(name)
        own = getattr(file, _NAME, None)
        if inspect.isfunction(own) and tuple(inspect.signature(own).parameters)[:4] == _ARGUMENTS:
            setattr(file, _NAME, _Rotation(own))


class _Rotation:
    """In the place of a function of transformers'."""

    def __init__(self, own: Rotate) -> None:
        self._own = own
        functools.update_wrapper(self, own)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any) -> Any:
        rotations = _current.get()
        if rotations is not None and not others and not options:
            rotated = rotations.try_rotate(self._own, q, k, cos, sin)
            if rotated is not None:
                return rotated
        return self._own(q, k, cos, sin, *others, **options)


def _fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether they have the shapes of one sequence."""
    return (
        q.dim() == k.dim() == 4
        and len(q) == len(k) == 1
        and q.shape[2:] == k.shape[2:]
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and cos.shape == sin.shape == (1, q.shape[2], cos.shape[-1])
        and cos.shape[-1] <= q.shape[-1]
    )


def _make_rows(ops: Ops, cos: Tensor, sin: Tensor, is_interleaved: bool) -> RopeRows | None:
    half = cos.shape[-1] // 2
    if any(not torch.equal(each[..., :half], each[..., half:]) for each in (cos, sin)):
        return None
    tables = ops.prepare_rope(*(each[0, :, :half].float() for each in (cos, sin)), is_interleaved=is_interleaved)
    return ops.select_rope(tables, torch.arange(cos.shape[1]))


def _are_alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool((one.float() - other.float()).abs().max() <= tolerance_of(one.dtype) * other.abs().max())
