"""Seeded random weights for performance work, from a configuration alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from services.worker.weights.model_weights import ALL

# The largest prime below 2^20.
_PERIOD = 1_048_573
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


class DummyWeights:
    """See `ModelWeights`. Every tensor exists, with values that do not depend on the order and slices of reading.

    They have mean 0 and standard deviation 1 / sqrt(in_features), so that activations keep their magnitude; norms'
    weights are about 1. Tensors are windows into one run of random numbers, as copying is several times faster than
    drawing. Its prime length keeps rows from starting at the same place.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        on_progress: Callable[[float], None] = lambda _: None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Draw from `seed`. `on_progress` is called with 0 at each tensor, as their number is unknown."""
        self.dtype = dtype
        self.device = torch.device(device)
        self._seed = seed
        self._on_progress = on_progress
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(_PERIOD, generator=generator)
        # Repeated once, so that a window of one period is contiguous wherever it starts.
        self._values = torch.cat((values, values)).to(device)

    def __contains__(self, name: str) -> bool:
        return False

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """See `ModelWeights`."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """See `ModelWeights`."""
        row_shape = shape[1:]
        selected = range(*rows.indices(shape[0])) if shape else range(1)
        out = torch.empty((len(selected), *row_shape) if shape else (), dtype=dtype or self.dtype, device=self.device)
        spread = shape[-1] ** -0.5 if len(shape) > 1 else _BIAS_SPREAD
        is_norm = len(shape) == 1 and name.endswith(".weight")
        self._fill(out.view(-1), name, selected.start * prod(row_shape), _NORM_SPREAD if is_norm else spread)
        return out.add_(1.0) if is_norm else out

    def linear(
        self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None
    ) -> Tensor:
        """See `ModelWeights`."""
        row_range, column_range = range(*rows.indices(shape[0])), range(*columns.indices(shape[1]))
        if out is None:
            out = self.empty((len(row_range), len(column_range)))
        self._fill_matrix(out, name, row_range, column_range, num_columns=shape[1], spread=shape[1] ** -0.5)
        return out

    def stacked(
        self,
        name: str,
        shape: tuple[int, int, int],
        *,
        experts: slice = ALL,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> Tensor:
        """See `ModelWeights`."""
        row_range, column_range = range(*rows.indices(shape[1])), range(*columns.indices(shape[2]))
        expert_range = range(*experts.indices(shape[0]))
        out = self.empty((len(expert_range), len(row_range), len(column_range)))
        for expert, matrix in zip(expert_range, out, strict=True):
            name_of_one = f"{name}.{expert}"
            spread = shape[1] ** -0.5
            self._fill_matrix(matrix, name_of_one, row_range, column_range, num_columns=shape[2], spread=spread)
        return out

    def ignore(self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = ()) -> None:
        """See `ModelWeights`; does nothing."""

    def check_complete(self) -> None:
        """See `ModelWeights`; never raises."""

    def _fill_matrix(
        self, out: Tensor, name: str, rows: range, columns: range, *, num_columns: int, spread: float
    ) -> None:
        if len(columns) == num_columns and out.is_contiguous():
            self._fill(out.view(-1), name, rows.start * num_columns, spread)
            return
        for row, target in zip(rows, out, strict=True):
            self._fill(target, name, row * num_columns + columns.start, spread)

    def _fill(self, out: Tensor, name: str, first: int, spread: float) -> None:
        """Write a tensor's values from index `first` on into `out` [n]."""
        self._on_progress(0.0)
        place = (_offset(self._seed, name) + first) % _PERIOD
        for start in range(0, len(out), _PERIOD):
            part = out[start : start + _PERIOD]
            torch.mul(self._values[place : place + len(part)], spread, out=part)


def dummy_digest(config: bytes, seed: int) -> str:
    """SHA-256 over configuration and seed, in hex."""
    return hashlib.sha256(b"dummy weights, seed %d\n" % seed + config).hexdigest()


def _offset(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _PERIOD
