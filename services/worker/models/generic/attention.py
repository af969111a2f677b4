"""Attention and masks as transformers' modelling code asks for them, computed by the backend over the paged cache.

transformers finds both functions by the name `IMPLEMENTATION`, once `register` has run. What they do is decided by the
current `Attend`: a dry run records the calls of a forward pass, and a step computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from typing_extensions import override

IMPLEMENTATION = "lockstep"
"""The name under which transformers finds our attention, masks and experts."""

# Maps indices (batch, head, query, key) to whether the query sees the key. Source: transformers, masking_utils.py.
MaskFunction = Callable[[Any, Any, Any, Any], Any]


class Mask:
    """What modelling code gets for a mask: it can only be handed on to attention."""

    __slots__ = ("function",)

    def __init__(self, function: MaskFunction) -> None:
        self.function = function

    @override
    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("modelling code compares the values of a mask")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise TypeError("modelling code looks at the values of a mask")


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """One call of attention by modelling code."""

    query: Tensor
    """[1, H, T, D]."""
    key: Tensor
    """[1, K, T, D]."""
    value: Tensor
    """[1, K, T, V]."""
    mask: object
    scale: float | None
    options: Mapping[str, Any]
    """All other arguments."""


class Attend(Protocol):
    """Answers the calls of a forward pass, in their order."""

    def __call__(self, request: AttentionRequest) -> Tensor:
        """What the tokens attend to, [1, T, H, V]."""


_current: ContextVar[Attend] = ContextVar("attention of the running forward pass")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let `attend` answer all calls in the body."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Make both functions known to transformers; repeated calls change nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def _attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    return _current.get()(AttentionRequest(query, key, value, attention_mask, scaling, options)), None


def _mask(*, mask_function: MaskFunction, **_arguments: Any) -> Mask:
    return Mask(mask_function)
