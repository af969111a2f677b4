"""What the tune stage measures: launches of a kernel, and the configurations that are tried with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from tests.bench.gpu.floors import Work

# What a device's last cache could hold. An H100's has 50 MB.
_CACHED_BYTES = 2**27
_MOST_COPIES = 20

Variant = Mapping[str, object]
"""Keyword arguments of a function that launches a kernel."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where arguments are made."""

    device: torch.device
    """May be `meta`, for launches that are only compiled."""
    dtype: torch.dtype
    """That of activations."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Launches:
    """A kernel with its arguments."""

    launch: Callable[..., Tensor | None]
    """Takes a number, which picks one of several equal sets of arguments, and a variant.

    Returns the result, or None if that changes from one launch to the next.
    """
    default: Variant
    """What is chosen if no variant is given."""
    work: Work


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel to be tuned at one size."""

    name: str
    make: Callable[[Place], Launches]
    """Makes the arguments."""
    rounds: tuple[tuple[Variant, ...], ...]
    """What is tried. A later round's variants are tried with the best ones of those before."""

    @property
    def num_variants(self) -> int:
        """Variants of all rounds."""
        return sum(map(len, self.rounds))


def num_copies(num_bytes: float) -> int:
    """How many sets of arguments a graph of launches takes in turn, so that none is read from the last cache."""
    return min(max(round(2 * _CACHED_BYTES / num_bytes), 1), _MOST_COPIES)


def grid(*values: tuple[int, ...], without: Callable[..., bool] = lambda *_: False) -> Iterator[tuple[int, ...]]:
    """All combinations, but those that `without` is true for."""
    return (each for each in product(*values) if not without(*each))


def in_words(variant: Variant) -> str:
    """A variant as it is written in code."""
    return ", ".join(f"{name}={value!r}" for name, value in variant.items())
