"""Reads a checkpoint; every tensor is copied once."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from services.worker.weights.model_weights import ALL
from services.worker.weights.quantization.config import PLAIN, QuantizationConfig
from services.worker.weights.quantization.dequantize import Region, dequantize, is_finite, selected_run
from services.worker.weights.quantization.layer_format import (
    FLOAT_DTYPES,
    LayerFormat,
    MalformedLayerError,
    PlainFormat,
    StoredTensor,
)
from services.worker.weights.weight_files import WeightFiles
from services.worker.weights.weight_problems import WeightProblems

logger = logging.getLogger(__name__)

# Limit on memory for tensors that are not read, per byte stored. No format expands by more than this.
_MAX_UNREAD_RATIO = 8
_MIN_UNREAD_BYTES = 1 << 26
# Reading stops at the first such tensor, so others may have the same problem.
_NOT_FINITE = "not finite"


class CheckpointWeights:
    """See `ModelWeights`. No backend here computes in a packed format, so every layer is dequantised.

    Invariant: after the first problem only headers are checked.
    """

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        config: QuantizationConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Read from `files`, in the formats of `config`; None means that no layer is quantised."""
        self.dtype = dtype
        self.device = torch.device(device)
        self._files = files
        self._config = config or QuantizationConfig()
        self._problems = WeightProblems()
        self._num_unread_bytes = 0
        # Names of requested tensors, stored or not.
        self._known: set[str] = set()
        self._ignored_prefixes: tuple[str, ...] = ()
        self._ignored_suffixes = self._config.unused_suffixes
        self._label_to_cost: defaultdict[str, _FormatCost] = defaultdict(_FormatCost)

    def __contains__(self, name: str) -> bool:
        return self._files.header(name) is not None

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """See `ModelWeights`."""
        self._refuse_beyond_limit(prod(shape) * self.dtype.itemsize)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        """See `ModelWeights`."""
        selected = selected_run(rows, shape[0]) if shape else range(0)
        out_shape = (len(selected), *shape[1:]) if shape else ()
        self._find(name, (StoredTensor("weight", ("",), (shape,), FLOAT_DTYPES),), num_values=prod(out_shape))
        out = torch.empty(out_shape, dtype=dtype or self.dtype, device=self.device)
        if self._problems:
            return out
        stored = self._files.read(name)
        out.copy_(stored[selected.start : selected.stop] if shape else stored)
        if not is_finite(out):
            self._problems.add(_NOT_FINITE, name)
        return out

    def linear(
        self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None
    ) -> Tensor:
        """See `ModelWeights`."""
        layer_format = self._linear_format(name)
        region = Region(None, selected_run(rows, shape[0]), selected_run(columns, shape[1]))
        stored = self._find(name, layer_format.stored_tensors(shape), num_values=region.num_values)
        self._known.update(name + suffix for suffix in layer_format.unused)
        if out is None:
            out = torch.empty((len(region.rows), len(region.columns)), dtype=self.dtype, device=self.device)
        self._read_layer(_Layer(name, layer_format, stored, shape), region, out)
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
        layer_format = self._config.stack_format(is_plain=name in self)
        region = Region(selected_run(experts, shape[0]), selected_run(rows, shape[1]), selected_run(columns, shape[2]))
        stored = self._find(name, layer_format.stored_tensors(shape), num_values=region.num_values)
        num_rows, num_columns = len(region.rows), len(region.columns)
        stored_shape = (num_columns, num_rows) if layer_format.is_transposed else (num_rows, num_columns)
        out = torch.empty((region.num_matrices, *stored_shape), dtype=self.dtype, device=self.device)
        if layer_format.is_transposed:
            out = out.transpose(1, 2)
        self._read_layer(_Layer(name, layer_format, stored, shape), region, out)
        return out

    def ignore(self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = ()) -> None:
        """See `ModelWeights`."""
        self._ignored_prefixes += tuple(prefixes)
        self._ignored_suffixes += tuple(suffixes)

    def check_complete(self) -> None:
        """See `ModelWeights`. Logs what dequantising costs, once per format."""
        for name in self._files.names:
            is_ignored = name.startswith(self._ignored_prefixes) or name.endswith(self._ignored_suffixes)
            if name not in self._known and not is_ignored and not self._is_empty(name):
                self._problems.add("unexpected for this architecture", name)
        if self._problems:
            raise self._problems.error(self._files.model_dir)
        for label, cost in self._label_to_cost.items():
            logger.info(
                "no kernel for this format: weights were dequantised at load, activations are not quantised",
                extra={"format": label, **cost.fields()},
            )

    def _is_empty(self, name: str) -> bool:
        """transformers writes empty tensors for parts that a model does not have."""
        header = self._files.header(name)
        return header is not None and 0 in header.shape

    def _linear_format(self, name: str) -> LayerFormat:
        """Plain if stored in a float dtype, whatever the configuration says."""
        header = self._files.header(f"{name}.weight")
        return PLAIN if header is not None and header.dtype in FLOAT_DTYPES else self._config.linear_format(name)

    def _find(self, name: str, wanted: tuple[StoredTensor, ...], *, num_values: int) -> dict[str, str]:
        """Record what is wrong with a layer's tensors, and return the names of those found, by role.

        Raises:
            ModelDirectoryError: unread layers need too much memory, with this one's `num_values` values.
        """
        found = {}
        for tensor in wanted:
            names = [name + suffix for suffix in tensor.suffixes]
            stored_name = next((candidate for candidate in names if candidate in self), None)
            self._known.add(stored_name or names[0])
            if stored_name is not None:
                self._check_header(stored_name, tensor)
                found[tensor.role] = stored_name
            elif not tensor.is_optional:
                self._problems.add("missing", names[0])
        if self._problems:
            self._num_unread_bytes += num_values * self.dtype.itemsize
            self._refuse_beyond_limit(self._num_unread_bytes)
        return found

    def _check_header(self, name: str, wanted: StoredTensor) -> None:
        header = self._files.header(name)
        assert header is not None
        if header.shape not in wanted.shapes:
            shapes = " or ".join(str(list(shape)) for shape in wanted.shapes)
            self._problems.add("wrong shape", name, f"has shape {list(header.shape)}, not {shapes}")
        if header.dtype not in wanted.dtypes:
            self._problems.add("wrong dtype", name, f"has dtype {header.dtype}, not {' or '.join(wanted.dtypes)}")

    def _refuse_beyond_limit(self, num_bytes: int) -> None:
        """Raise if much more memory is needed than is stored: the configuration is another model's."""
        limit = max(_MAX_UNREAD_RATIO * self._files.num_bytes, _MIN_UNREAD_BYTES)
        if num_bytes > limit:
            self._problems.add("too small", "all files together", f"have {self._files.num_bytes} bytes")
            raise self._problems.error(self._files.model_dir)

    def _read_layer(self, layer: _Layer, region: Region, out: Tensor) -> None:
        if self._problems:
            return
        parts = {role: self._files.read(name) for role, name in layer.stored.items()}
        if not region.num_values:
            return
        try:
            is_whole_finite = dequantize(layer.layer_format, parts, region, out)
        except MalformedLayerError as error:
            self._problems.add("malformed", layer.name, f"({error})")
            return
        if not is_whole_finite:
            self._problems.add(_NOT_FINITE, layer.name)
        if not isinstance(layer.layer_format, PlainFormat):
            stored_bytes = layer.share(region) * sum(part.nbytes for part in parts.values())
            self._label_to_cost[layer.layer_format.label].add(region.num_matrices, stored_bytes, out.nbytes)


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    layer_format: LayerFormat
    stored: Mapping[str, str]
    """Names of tensors, by role."""
    shape: tuple[int, ...]

    def share(self, region: Region) -> float:
        return region.num_values / max(prod(self.shape), 1)


@dataclass(slots=True)
class _FormatCost:
    """What one format's layers take, in bytes."""

    num_matrices: int = 0
    stored: float = 0
    memory: int = 0

    def add(self, num_matrices: int, stored: float, memory: int) -> None:
        self.num_matrices += num_matrices
        self.stored += stored
        self.memory += memory

    def fields(self) -> dict[str, object]:
        return {
            "num_matrices": self.num_matrices,
            "stored_bytes": round(self.stored),
            "memory_bytes": self.memory,
        }
