"""What calls of kernels leave for the calls after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Renewable(Protocol):
    """What is computed on the host from a step's tensors, for its kernels."""

    def renew(self) -> None:
        """Compute it again, where it is."""


class Results:
    """A backend's: in torch's memory, or in a capture's while it records calls."""

    def __init__(self) -> None:
        self.empty: Callable[..., Tensor] = torch.empty
        """As `torch.empty`, with a `dtype`."""
        self._plans: list[Renewable] | None = None

    def add_plan(self, plan: Renewable) -> None:
        """Have the capture, if there is one, renew `plan` for each replay."""
        if self._plans is not None:
            self._plans.append(plan)

    @contextmanager
    def kept(self, empty: Callable[..., Tensor], plans: list[Renewable]) -> Iterator[None]:
        """In the body, make results with `empty`, and add what is planned to `plans`."""
        self.empty, self._plans = empty, plans
        try:
            yield
        finally:
            self.empty, self._plans = torch.empty, None
