"""Weights that are asked for and never read: with them a model is built to find out what it is."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.model_weights import ALL, DENSE, ModelWeights, WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.quantization.dequantize import Region, selected_run
from services.worker.weights.quantization.layer_format import LayerFormat


class PlannedWeights(ModelWeights):
    """Every tensor has its shape and no values: all are on torch's `meta` device.

    `packed_formats` are those that matrices may be in by their configuration and the parts that a rank has.
    """

    device = torch.device("meta")

    def __init__(
        self,
        dtype: torch.dtype,
        config: QuantizationConfig | None = None,
        *,
        formats: WeightFormats = DENSE,
        names: Container[str] | None = None,
    ) -> None:
        """Plan for the formats of `config`.

        Args:
            dtype: The model's.
            config: None means that no layer is packed.
            formats: What the layers become.
            names: The tensors that are stored; None means all that are asked for.
        """
        self.dtype = dtype
        self.packed_formats: set[MatrixFormat] = set()
        self.has_experts = False
        """Whether any matrix was one of an expert's."""
        self._config = config or QuantizationConfig()
        self._formats = formats
        self._names = names

    def __contains__(self, name: str) -> bool:
        return self._names is None or name in self._names

    @override
    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        selected = (len(selected_run(rows, shape[0])), *shape[1:]) if shape else ()
        return torch.empty(selected, dtype=dtype or self.dtype, device=self.device)

    def scale(self, names: Sequence[str]) -> Tensor:  # noqa: ARG002
        """See `ModelWeights`."""
        return torch.empty(1, device=self.device)

    @override
    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._plan(_region(shape, rows, columns), self._config.linear_format(name), self._formats)

    @override
    def expert(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        self.has_experts = True
        return self._plan(_region(shape, rows, columns), self._config.linear_format(name), self._formats.of_experts)

    @override
    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._plan(_region(shape, rows, ALL), self._config.linear_format(name), self._formats.of_embedding)

    @override
    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._plan(_region(shape, rows, ALL), self._config.linear_format(name), self._formats.of_head)

    @override
    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return torch.empty(_region(shape, rows, columns).shape, dtype=self.dtype, device=self.device)

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
        self.has_experts = True
        _, num_inputs, num_outputs = shape
        layer_format = self._config.stack_format(is_plain=False)
        return self._plan(_region((num_outputs, num_inputs), rows, columns), layer_format, self._formats)

    @override
    def differ(self, name: str, other: str) -> bool:
        return False

    def ignore(
        self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = (), patterns: Sequence[str] = ()
    ) -> None:
        """See `ModelWeights`; does nothing."""

    def check_complete(self) -> None:
        """See `ModelWeights`; never raises."""

    def _plan(self, region: Region, layer_format: LayerFormat, formats: WeightFormats) -> Tensor:
        wanted = formats.quantized if layer_format.packed_as is None else layer_format.packed_as
        is_cut = layer_format.packed_as is not None and not layer_format.may_pack(region.columns)
        if region.num_values and not is_cut and wanted is not None and wanted in (formats.quantized, *formats.kept):
            self.packed_formats.add(wanted)
        return torch.empty(region.shape, dtype=self.dtype, device=self.device)


def _region(shape: tuple[int, int], rows: slice, columns: slice) -> Region:
    return Region(selected_run(rows, shape[0]), selected_run(columns, shape[1]))
