"""What a backend makes of weights once, and how it is kept for the processes after this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class KeptError(Exception):
    """What was kept does not fit what is asked for; the message says what it is."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made of one matrix."""

    numbers: tuple[int, ...]
    """What says how the tensors are to be read."""
    tensors: tuple[Tensor | None, ...]
    """Contiguous, on the CPU, and never written again."""


class Keep(Protocol):
    """Where a backend gets what it makes of weights: made now, or kept from an earlier load."""

    def __call__(self, make: Callable[[], Prepared]) -> Prepared:
        """What `make` returns, or an equal one from an earlier load, and then `make` is not called.

        Calls come in the same order in every load of the same weights.
        """


def make_anew(make: Callable[[], Prepared]) -> Prepared:
    """Keep nothing: see `Keep`."""
    return make()


class Packing:
    """How a backend packs weights into memory that another process can take as it is."""

    def __init__(self, form: str) -> None:
        """`form` is equal only where equal weights become equal bytes."""
        self.form = form
        self.keep: Keep = make_anew

    @contextmanager
    def kept_by(self, keep: Keep) -> Iterator[None]:
        """Take what is packed from `keep`, in this block."""
        self.keep = keep
        try:
            yield
        finally:
            self.keep = make_anew
