"""Seeded random weights for performance work, from a configuration alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat, to_device
from services.worker.weights.dummy_parts import dummy_parts
from services.worker.weights.model_weights import ALL, DENSE, ModelWeights, WeightFormats
from services.worker.weights.quantization.config import PLAIN, QuantizationConfig
from services.worker.weights.quantization.dequantize import Region, dequantize, selected_run
from services.worker.weights.quantization.gguf_blocks import GgufFormat
from services.worker.weights.quantization.layer_format import LayerFormat
from services.worker.weights.quantization.mxfp4 import Mxfp4StackFormat
from services.worker.weights.quantization.quantize import quantize

# The largest prime below 2^20.
_PERIOD = 1_048_573
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


class DummyWeights(ModelWeights):
    """Weights without files. Every tensor exists, with values that do not depend on the order and slices of reading.

    They have mean 0 and standard deviation 1 / sqrt(in_features), so that activations keep their magnitude; norms'
    weights are about 1. Linear layers and experts are in the format of the configuration, as checkpoints store them;
    embeddings and heads only in GGUF's blocks.

    Tensors are windows into one run of random numbers, as copying is several times faster than drawing. Its prime
    length keeps rows from starting at the same place.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        on_progress: Callable[[float], None] = lambda _: None,
        device: torch.device | str = "cpu",
        *,
        config: QuantizationConfig | None = None,
        formats: WeightFormats = DENSE,
    ) -> None:
        """Draw from `seed`, in the formats of `config`; None means that no layer is packed.

        `on_progress` is called with 0 at each tensor, as their number is unknown.
        """
        self.dtype = dtype
        self.device = torch.device(device)
        self.packed_formats: set[MatrixFormat] = set()
        self._config = config or QuantizationConfig()
        self._formats = formats
        self._seed = seed
        self._on_progress = on_progress
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(_PERIOD, generator=generator)
        # Repeated once, so that a window of one period is contiguous wherever it starts.
        self._values = torch.cat((values, values)).to(device)
        codes = torch.randint(0, 256, (_PERIOD,), generator=generator, dtype=torch.uint8)
        self._codes = torch.cat((codes, codes)).to(device)

    def __contains__(self, name: str) -> bool:
        return False

    @override
    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
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

    @override
    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        region = Region(selected_run(rows, shape[0]), selected_run(columns, shape[1]))
        return self._draw_matrix(name, region, shape, self._config.linear_format(name), self._formats)

    @override
    def expert(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self.linear(name, shape, rows=rows, columns=columns)

    @override
    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        region = Region(selected_run(rows, shape[0]), range(shape[1]))
        return self._draw_matrix(name, region, shape, self._table_format(name), self._formats.of_embedding)

    @override
    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        region = Region(selected_run(rows, shape[0]), range(shape[1]))
        return self._draw_matrix(name, region, shape, self._table_format(name), self._formats.of_head)

    @override
    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._draw(name, Region(selected_run(rows, shape[0]), selected_run(columns, shape[1])), shape)

    @override
    def stacked(
        self,
        name: str,
        shape: tuple[int, int, int],
        expert: int,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        in_any_order: bool = False,
    ) -> Matrix:
        _, num_inputs, num_outputs = shape
        layer_format = self._config.stack_format(is_plain=False)
        region = Region(selected_run(rows, num_outputs), selected_run(columns, num_inputs))
        return self._draw_matrix(f"{name}.{expert}", region, (num_outputs, num_inputs), layer_format, self._formats)

    @override
    def differ(self, name: str, other: str) -> bool:
        return False

    def ignore(
        self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = (), patterns: Sequence[str] = ()
    ) -> None:
        """See `ModelWeights`; does nothing."""

    def check_complete(self) -> None:
        """See `ModelWeights`; never raises."""

    def _table_format(self, name: str) -> LayerFormat:
        """The format of an embedding or a head."""
        layer_format = self._config.linear_format(name)
        return layer_format if isinstance(layer_format, GgufFormat) else PLAIN

    def _draw_matrix(
        self, name: str, region: Region, shape: tuple[int, int], layer_format: LayerFormat, formats: WeightFormats
    ) -> Matrix:
        if layer_format.packed_as is not None and region.num_values:
            return self._draw_packed(name, region, shape, layer_format, formats)
        quantized = formats.quantized
        if quantized is None or not region.num_values:
            return self._draw(name, region, shape)
        blocks = (self._draw(name, Region(block, region.columns), shape) for block in region.row_blocks())
        self.packed_formats.add(quantized)
        return to_device(quantize(blocks, region.shape, quantized), self.device)

    def _draw_packed(
        self, name: str, region: Region, shape: tuple[int, int], layer_format: LayerFormat, formats: WeightFormats
    ) -> Matrix:
        """What loading such a layer gives: packed if the format is kept and the part cuts no group, else dense."""
        num_outputs, num_inputs = shape
        is_stack = isinstance(layer_format, Mxfp4StackFormat)
        stored_shape = (1, num_inputs, num_outputs) if is_stack else shape
        parts = dummy_parts(
            layer_format, stored_shape, num_inputs**-0.5, lambda role, size: self._draw_codes(f"{name}.{role}", size)
        )
        if is_stack:
            parts = {role: part[0] for role, part in parts.items()}
        if layer_format.packed_as in formats.kept:
            packed = layer_format.packed(parts, region.rows, region.columns)
            if packed is not None:
                self.packed_formats.add(layer_format.packed_as)
                return to_device(packed, self.device)
        out = torch.empty(region.shape, dtype=self.dtype, device=self.device)
        dequantize(layer_format, {role: part.cpu() for role, part in parts.items()}, region, out)
        return out

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

    def _draw_codes(self, name: str, num_bytes: int) -> Tensor:
        """New random bytes [num_bytes], uint8."""
        self._on_progress(0.0)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        place = _offset(self._seed, name)
        for start in range(0, num_bytes, _PERIOD):
            part = out[start : start + _PERIOD]
            part.copy_(self._codes[place : place + len(part)])
        return out


def dummy_digest(config: bytes, seed: int) -> str:
    """SHA-256 over configuration and seed, in hex."""
    return hashlib.sha256(b"dummy weights, seed %d\n" % seed + config).hexdigest()


def _offset(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _PERIOD
