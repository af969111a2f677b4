"""Seeded random weights for performance work, from a configuration alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat, to_device
from services.worker.weights.model_weights import ALL, DENSE, WeightFormats
from services.worker.weights.quantization.dequantize import Region, selected_run
from services.worker.weights.quantization.quantize import quantize

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
        *,
        formats: WeightFormats = DENSE,
    ) -> None:
        """Draw from `seed`.

        `on_progress` is called with 0 at each tensor, as their number is unknown.
        """
        self.dtype = dtype
        self.device = torch.device(device)
        self.packed_formats: set[MatrixFormat] = set()
        self._formats = formats
        self._seed = seed
        self._on_progress = on_progress
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(_PERIOD, generator=generator)
        # Repeated once, so that a window of one period is contiguous wherever it starts.
        self._values = torch.cat((values, values)).to(device)

    def __contains__(self, name: str) -> bool:
        return False

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """See `ModelWeights`."""
        row_shape = shape[1:]
        selected = range(*rows.indices(shape[0])) if shape else range(1)
        out = torch.empty((len(selected), *row_shape) if shape else (), dtype=dtype or self.dtype, device=self.device)
        spread = shape[-1] ** -0.5 if len(shape) > 1 else _BIAS_SPREAD
        is_norm = len(shape) == 1 and name.endswith(".weight")
        self._fill(out.view(-1), name, selected.start * prod(row_shape), _NORM_SPREAD if is_norm else spread)
        return out.add_(1.0) if is_norm else out

    def scale(self, names: Sequence[str]) -> Tensor:  # noqa: ARG002
        """See `ModelWeights`; 1."""
        return torch.ones(1, device=self.device)

    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        """See `ModelWeights`."""
        region = Region(selected_run(rows, shape[0]), selected_run(columns, shape[1]))
        return self._draw_matrix(name, region, shape, self._formats.quantized)

    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        """See `ModelWeights`."""
        return self._draw(name, Region(selected_run(rows, shape[0]), range(shape[1])), shape)

    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        """See `ModelWeights`."""
        region = Region(selected_run(rows, shape[0]), range(shape[1]))
        return self._draw_matrix(name, region, shape, self._formats.of_head.quantized)

    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """See `ModelWeights`."""
        return self._draw(name, Region(selected_run(rows, shape[0]), selected_run(columns, shape[1])), shape)

    def stacked(
        self, name: str, shape: tuple[int, int, int], expert: int, *, rows: slice = ALL, columns: slice = ALL
    ) -> Matrix:
        """See `ModelWeights`."""
        return self.linear(f"{name}.{expert}", (shape[2], shape[1]), rows=rows, columns=columns)

    def ignore(self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = ()) -> None:
        """See `ModelWeights`; does nothing."""

    def check_complete(self) -> None:
        """See `ModelWeights`; never raises."""

    def _draw_matrix(self, name: str, region: Region, shape: tuple[int, int], quantized: MatrixFormat | None) -> Matrix:
        if quantized is None or not region.num_values:
            return self._draw(name, region, shape)
        blocks = (self._draw(name, Region(block, region.columns), shape) for block in region.row_blocks())
        self.packed_formats.add(quantized)
        return to_device(quantize(blocks, region.shape, quantized), self.device)

    def _draw(self, name: str, region: Region, shape: tuple[int, int]) -> Tensor:
        """A part of a matrix of this shape."""
        out = torch.empty(region.shape, dtype=self.dtype, device=self.device)
        num_columns, first = shape[1], region.columns.start
        spread = num_columns**-0.5
        if len(region.columns) == num_columns:
            self._fill(out.view(-1), name, region.rows.start * num_columns, spread)
            return out
        for row, target in zip(region.rows, out, strict=True):
            self._fill(target, name, row * num_columns + first, spread)
        return out

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
