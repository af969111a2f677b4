"""Reads a checkpoint: every tensor is copied, dequantised or quantised once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix, split_order
from services.worker.ops.matrix_rows import MatrixFormat, format_of, to_device
from services.worker.weights.format_costs import FormatCosts
from services.worker.weights.model_weights import ALL, DENSE, ModelWeights, WeightFormats
from services.worker.weights.quantization.config import PLAIN, QuantizationConfig
from services.worker.weights.quantization.dequantize import (
    Region,
    dequantize,
    has_finite_values,
    is_finite,
    selected_run,
)
from services.worker.weights.quantization.layer_format import (
    FLOAT_DTYPES,
    LayerFormat,
    MalformedLayerError,
    PlainFormat,
    StoredTensor,
)
from services.worker.weights.quantization.quantize import quantize
from services.worker.weights.weight_files import WeightFiles
from services.worker.weights.weight_hints import format_hint, names_hint
from services.worker.weights.weight_problems import WeightProblems
from shared.model_files.model_dir import ModelDirectoryError

# Limit on memory for tensors that are not read, per byte stored. No format expands by more than this.
_MAX_UNREAD_RATIO = 8
_MIN_UNREAD_BYTES = 1 << 26
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Limits the memory for two tensors that are compared in another dtype.
_COMPARED_ROWS = 4096
# Reading stops at the first such tensor, so others may have the same problem.
_NOT_FINITE = "not finite"
_MISSING = "missing"
_WRONG_DTYPE = "wrong dtype"
_UNEXPECTED = "unexpected for this architecture"


class CheckpointWeights(ModelWeights):
    """Weights from the files of a model directory.

    Invariant: after the first problem only headers are checked.
    """

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        config: QuantizationConfig | None = None,
        device: torch.device | str = "cpu",
        *,
        formats: WeightFormats = DENSE,
    ) -> None:
        """Read from `files`, in the formats of `config`; None means that no layer is quantised."""
        self.dtype = dtype
        self.device = torch.device(device)
        self.packed_formats: set[MatrixFormat] = set()
        self._files = files
        self._config = config or QuantizationConfig()
        self._formats = formats
        self._problems = WeightProblems()
        self._num_unread_bytes = 0
        # Names of requested tensors, stored or not.
        self._known: set[str] = set()
        self._ignored_prefixes: tuple[str, ...] = ()
        self._ignored_suffixes = self._config.unused_suffixes
        self._ignored_patterns: tuple[re.Pattern[str], ...] = ()
        self._costs = FormatCosts(formats.kept)

    def __contains__(self, name: str) -> bool:
        return self._files.header(name) is not None

    @override
    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
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

    @override
    def scale(self, names: Sequence[str]) -> Tensor:
        wanted = StoredTensor("scale", tuple(names), ((), (1,)), FLOAT_DTYPES, is_optional=True)
        found = self._find("", (wanted,), num_values=1)
        scale = torch.ones(1)
        if found and not self._problems:
            scale.copy_(self._files.read(found["scale"]))
            if not _SMALLEST_SCALE <= float(scale) < math.inf:
                self._problems.add("malformed", found["scale"], f"(a scale of {float(scale)})")
        return scale.to(self.device)

    @override
    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._read_matrix(*self._linear_part(name, shape, rows, columns), self._formats)

    @override
    def expert(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        return self._read_matrix(*self._linear_part(name, shape, rows, columns), self._formats.of_experts)

    @override
    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._read_matrix(*self._linear_part(name, shape, rows, ALL), self._formats.of_embedding)

    @override
    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        return self._read_matrix(*self._linear_part(name, shape, rows, ALL), self._formats.of_head)

    @override
    def dense(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        matrix = self._read_matrix(*self._linear_part(name, shape, rows, columns), DENSE)
        assert isinstance(matrix, Tensor)
        return matrix

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
        num_experts, num_inputs, num_outputs = shape
        region = Region(selected_run(rows, num_outputs), selected_run(columns, num_inputs))
        header, turned = self._files.header(name), (num_experts, num_outputs, num_inputs)
        is_turned = in_any_order and header is not None and header.shape == turned
        layer_format = self._config.stack_format(is_plain=header is not None, is_transposed=not is_turned)
        stored_shape = turned if is_turned else shape
        stored = self._find(name, layer_format.stored_tensors(stored_shape), num_values=region.num_values)
        return self._read_matrix(_Layer(name, layer_format, stored, stored_shape, expert), region, self._formats)

    @override
    def differ(self, name: str, other: str) -> bool:
        headers = self._files.header(name), self._files.header(other)
        self._known.add(name)
        if headers[0] is None or headers[1] is None or self._problems:
            return False
        if headers[0].shape != headers[1].shape or any(
            header.dtype not in FLOAT_DTYPES for header in headers if header
        ):
            return True
        ours, theirs = self._files.read(name), self._files.read(other)
        if ours.dtype == theirs.dtype:
            return not torch.equal(ours, theirs)
        blocks = [slice(start, start + _COMPARED_ROWS) for start in range(0, len(ours), _COMPARED_ROWS)]
        return not all(torch.equal(ours[rows].to(self.dtype), theirs[rows].to(self.dtype)) for rows in blocks)

    @override
    def ignore(
        self, *, prefixes: Sequence[str] = (), suffixes: Sequence[str] = (), patterns: Sequence[str] = ()
    ) -> None:
        self._ignored_prefixes += tuple(prefixes)
        self._ignored_suffixes += tuple(suffixes)
        self._ignored_patterns += tuple(map(re.compile, patterns))

    def check_complete(self) -> None:
        """See `ModelWeights`. Logs what each format costs."""
        for name in self._files.names:
            if name not in self._known and not self._is_ignored(name) and not self._adds_nothing(name):
                self._problems.add(_UNEXPECTED, name)
        if self._problems:
            raise self._error()
        self._costs.log()

    def _is_ignored(self, name: str) -> bool:
        has_end = name.startswith(self._ignored_prefixes) or name.endswith(self._ignored_suffixes)
        return has_end or any(pattern.search(name) for pattern in self._ignored_patterns)

    def _adds_nothing(self, name: str) -> bool:
        """Whether transformers (an empty tensor) or AutoGPTQ (a bias of zeros) writes it for a part that is absent."""
        header = self._files.header(name)
        assert header is not None
        is_bias = name.endswith(".bias") and len(header.shape) == 1 and header.dtype in FLOAT_DTYPES
        return 0 in header.shape or (is_bias and not self._problems and not self._files.read(name).any())

    def _linear_part(self, name: str, shape: tuple[int, int], rows: slice, columns: slice) -> tuple[_Layer, Region]:
        layer_format = self._linear_format(name)
        region = Region(selected_run(rows, shape[0]), selected_run(columns, shape[1]))
        stored = self._find(name, layer_format.stored_tensors(shape), num_values=region.num_values)
        self._known.update(name + suffix for suffix in layer_format.unused)
        return _Layer(name, layer_format, stored, shape), region

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
                self._problems.add(_MISSING, names[0])
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
            self._problems.add(_WRONG_DTYPE, name, f"has dtype {header.dtype}, not {' or '.join(wanted.dtypes)}")

    def _refuse_beyond_limit(self, num_bytes: int) -> None:
        """Raise if much more memory is needed than is stored: the configuration is another model's."""
        limit = max(_MAX_UNREAD_RATIO * self._files.num_bytes, _MIN_UNREAD_BYTES)
        if num_bytes > limit:
            self._problems.add("too small", "all files together", f"have {self._files.num_bytes} bytes")
            raise self._error()

    def _error(self) -> ModelDirectoryError:
        unread = frozenset(self._files.names) - self._known
        hints = [names_hint(self._problems.tensors(_MISSING), unread)]
        if not self._config.is_quantized:
            wrong = self._problems.tensors(_WRONG_DTYPE) | unread
            hints.append(format_hint({name: header.dtype for name in wrong if (header := self._files.header(name))}))
        return self._problems.error(self._files.model_dir, [hint for hint in hints if hint])

    def _read_matrix(self, layer: _Layer, region: Region, formats: WeightFormats) -> Matrix:
        """The layer's part in one of `formats`, or else dense; arbitrary values after a problem."""
        if not self._problems:
            # All of a layer's tensors are read, and so hashed, even if none of its values are needed here.
            parts = {role: self._files.read(name) for role, name in layer.stored.items()}
            if region.num_values:
                try:
                    return self._convert(layer, layer.select(parts), region, formats)
                except MalformedLayerError as error:
                    self._problems.add("malformed", layer.name, f"({error})")
        return self._empty(region)

    def _convert(self, layer: _Layer, parts: Mapping[str, Tensor], region: Region, formats: WeightFormats) -> Matrix:
        layer_format, matrix = layer.layer_format, self._pack(layer, parts, region, formats)
        if matrix is None:
            matrix = self._empty(region)
            is_whole_finite = dequantize(layer_format, parts, region, matrix)
        else:
            is_whole_finite = has_finite_values(matrix)
            matrix = to_device(matrix, self.device)
        if not is_whole_finite:
            self._problems.add(_NOT_FINITE, layer.name)
        if (packed_format := format_of(matrix)) is not None:
            self.packed_formats.add(packed_format)
        if not isinstance(layer_format, PlainFormat):
            stored_bytes = region.num_values / prod(layer.shape[-2:]) * sum(part.nbytes for part in parts.values())
            self._costs.add(layer_format, matrix, stored_bytes)
        return matrix

    def _pack(
        self, layer: _Layer, parts: Mapping[str, Tensor], region: Region, formats: WeightFormats
    ) -> Matrix | None:
        layer_format = layer.layer_format
        if layer_format.packed_as in formats.kept:
            packed = layer_format.packed(parts, region.rows, region.columns)
            is_in_order = packed is None or split_order(packed)[1] is None
            return packed if is_in_order or formats.has_orders else None
        if formats.quantized is None or not isinstance(layer_format, PlainFormat):
            return None
        blocks = (layer_format.dequantize(parts, rows, region.columns) for rows in region.row_blocks())
        return quantize(blocks, region.shape, formats.quantized)

    def _empty(self, region: Region) -> Tensor:
        return torch.empty(region.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    layer_format: LayerFormat
    stored: Mapping[str, str]
    """Names of tensors, by role."""
    shape: tuple[int, ...]
    expert: int | None = None
    """Its number in a stack; None means that the layer is no stack."""

    def select(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The one matrix's part of each tensor."""
        return parts if self.expert is None else {role: part[self.expert] for role, part in parts.items()}
