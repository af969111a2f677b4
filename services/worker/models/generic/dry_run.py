"""A forward pass on torch's `meta` device, which finds out what modelling code asks of attention.

Several classes state a window only in the mask that they ask for, so each call's mask is looked at where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.models.generic.attention import Attend, AttentionRequest, Mask, MaskFunction
from shared.model_files.model_dir import ModelDirectoryError

# Arguments that repeat what the step decides, or that only training reads.
_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
)
# How far beyond a window's edges its mask is looked at.
_MARGIN = 2


class UnservableError(ModelDirectoryError):
    """Modelling code that cannot compute several sequences in a step over a paged cache; the message says why."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call of attention, the same in every forward pass."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    """At most `key_dim`; values are padded to that in the cache."""
    scale: float
    window: int | None
    """How many tokens a token sees, including itself; None means all up to itself."""


class DryRun(Attend):
    """Records calls and refuses those that the backend could not answer."""

    def __init__(self, context_length: int) -> None:
        """`context_length` is that which is served."""
        self.calls: list[PlannedCall] = []
        self._context_length = context_length
        self._mask_to_window: dict[int, int | None] = {}
        # Keeps the ids above from being used again.
        self._masks: list[Mask] = []

    @override
    def __call__(self, request: AttentionRequest) -> Tensor:
        query, key, value = request.query, request.key, request.value
        number = len(self.calls)
        _check_options(request, number)
        if not isinstance(request.mask, Mask):
            raise UnservableError(f"attention call {number} has {_describe(request.mask)}, not the mask that was made")
        if key.shape[:3] != value.shape[:3] or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
            raise UnservableError(
                f"attention call {number} has queries {[*query.shape]}, keys {[*key.shape]}, values {[*value.shape]}"
            )
        if value.shape[-1] > key.shape[-1]:
            raise UnservableError(f"attention call {number} has values wider than keys")
        window = self._window(request.mask, number)
        named = request.options.get("sliding_window")
        if named is not None and named < self._context_length and named != window:
            raise UnservableError(
                f"attention call {number} names a window of {named}, but its mask has "
                f"{'none' if window is None else window}"
            )
        scale = key.shape[-1] ** -0.5 if request.scale is None else float(request.scale)
        call = PlannedCall(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], scale, window)
        self.calls.append(call)
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

    def _window(self, mask: Mask, number: int) -> int | None:
        if id(mask) not in self._mask_to_window:
            self._masks.append(mask)
            try:
                self._mask_to_window[id(mask)] = read_window(mask.function, self._context_length)
            except UnservableError as error:
                raise UnservableError(f"attention call {number}: {error}") from error
        return self._mask_to_window[id(mask)]


def read_window(function: MaskFunction, context_length: int) -> int | None:
    """How many tokens a causal mask lets each token see; None if it lets it see all up to itself.

    Raises:
        UnservableError: it is not causal, has other holes, or depends on tensors of the device.
    """
    last = context_length - 1
    num_seen = int(_row(function, last, range(context_length)).sum())
    window = None if num_seen == context_length else num_seen
    edges = {0, 1, last // 2, last}
    if window is not None:
        edges |= {window + offset for offset in range(-_MARGIN, _MARGIN + 1)} | {2 * window}
    for query in sorted(edge for edge in edges if 0 <= edge <= last):
        first = 0 if window is None else max(query - window + 1, 0)
        # A row is looked at whole: what it must not see may be anywhere, tokens after it too.
        keys = range(min(query + _MARGIN + 1, context_length))
        seen = _row(function, query, keys)
        expected = torch.tensor([first <= key <= query for key in keys], device="cpu")
        if not torch.equal(seen, expected):
            raise UnservableError(
                f"its mask is neither causal nor a sliding window: token {query} sees {_describe_row(seen)}"
            )
    return window


def _row(function: MaskFunction, query: int, keys: range) -> Tensor:
    """Which keys a query sees, [len(keys)] bool."""
    with torch.device("cpu"):
        zero = torch.tensor(0)
        seen = function(zero, zero, torch.tensor([query]), torch.arange(len(keys)))
    if not isinstance(seen, Tensor) or seen.device.type != "cpu":
        raise UnservableError("its mask depends on tensors of the device")
    return seen.bool().expand(len(keys))


def _check_options(request: AttentionRequest, number: int) -> None:
    options = dict(request.options)
    if options.pop("is_causal", None) is False:
        raise UnservableError(f"attention call {number} lets tokens see later ones")
    if options.pop("softcap", None) is not None:
        raise UnservableError(f"attention call {number} has a soft cap")
    options.pop("sliding_window", None)
    sinks = options.pop("s_aux", None)
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.numel() % request.query.shape[1]):
        raise UnservableError(f"attention call {number} has sinks that are not one number for each head")
    unknown = sorted(name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise UnservableError(f"attention call {number} has the argument {unknown[0]}, which is not known here")


def _describe(mask: object) -> str:
    return "no mask" if mask is None else f"a {type(mask).__name__} for a mask"


def _describe_row(seen: Tensor) -> str:
    places = seen.nonzero().flatten().tolist()
    return "nothing" if not places else f"{len(places)} tokens between {places[0]} and {places[-1]}"
