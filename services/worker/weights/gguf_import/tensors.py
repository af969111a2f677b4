"""What tensors of a GGUF file become in Hugging Face's layout, a part at a time.

Names of GGUF follow "Standardized tensor names" in ggml's docs/gguf.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from services.worker.weights.gguf_import.gguf_file import GgufTensor
from services.worker.weights.quantization.gguf_blocks import BLOCK_TYPES, SUFFIX, BlockType
from services.worker.weights.safetensors_writer import StreamedTensor
from services.worker.weights.weight_files import TensorHeader

# Bounds the memory for a part of a tensor: its values in float32.
_PART_BYTES = 1 << 20
_FLOATS = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_WEIGHT = ".weight"

Sizes = Mapping[str, int]
Parts = Iterator[npt.NDArray[Any]]


class UnexpectedTensorsError(Exception):
    """Tensors are missing, unexpected, of the wrong shape or of a type that cannot be read; the message names them."""


class Rule(Protocol):
    """What becomes of one tensor, or of some together."""

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """The tensors' names, after a layer's prefix, and the shapes that they must have."""

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """Add what they become, named after `prefix`."""


@dataclass(slots=True)
class ResultTensors:
    """Collects what is to be written, and in which formats."""

    keeps_formats: bool
    """Whether blocks and 16-bit floats stay as they are (see `gguf_blocks`); otherwise all becomes float32."""
    tensors: list[StreamedTensor] = field(default_factory=list)
    layer_to_type: dict[str, BlockType] = field(default_factory=dict)
    has_mxfp4: bool = False
    costs: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Bytes stored and bytes written of blocks that no kernel computes with, by GGUF's name of their type."""

    def add_rows(
        self,
        name: str,
        tensor: GgufTensor,
        rows: Sequence[range],
        *,
        shape: tuple[int, ...] = (),
        num_rotated_heads: int = 0,
        columns: Sequence[range] = (),
    ) -> None:
        """Add rows of a tensor as the weight or bias `name`.

        Args:
            rows: The numbers of the rows in the tensor, in the order of the result's.
            shape: The result's; by default the matrix of these rows.
            num_rotated_heads: Heads whose rows GGUF reorders: a llama's rotated pairs are adjacent there, but half a
                head apart here.
            columns: Likewise the numbers of all columns, if their order changes. What keeps its blocks has runs of
                whole ones.
        """
        num_rows = sum(map(len, rows))
        head_rows = num_rows // num_rotated_heads if num_rotated_heads else 1
        read = partial(_read_parts, tensor, rows, head_rows=head_rows)
        shape = shape or (num_rows, tensor.shape[-1])
        block_type = BLOCK_TYPES.get(tensor.kind.name) if self.keeps_formats and len(shape) == 2 else None
        keeps_floats = self.keeps_formats and tensor.kind in _FLOATS
        if columns and (block_type is not None or keeps_floats):
            read = partial(_with_columns, tensor.kind, columns, read)
        if block_type is not None and name.endswith(_WEIGHT):
            layer = name.removesuffix(_WEIGHT)
            blocks = (num_rows, tensor.row_bytes // block_type.num_bytes, block_type.num_bytes)
            self.layer_to_type[layer] = block_type
            self._add(layer + SUFFIX, "U8", blocks, read)
        elif keeps_floats:
            self._add(name, _FLOATS[tensor.kind], shape, read)
        else:
            order = np.concatenate(columns) if columns else slice(None)
            self.add_values(name, [tensor], shape, lambda: (dequantize(part, tensor.kind)[:, order] for part in read()))

    def add_values(
        self,
        name: str,
        sources: Sequence[GgufTensor],
        shape: tuple[int, ...],
        parts: Callable[[], Parts],
    ) -> None:
        """Add float32 values, computed from `sources`."""
        self._add(name, "F32", shape, lambda: (np.ascontiguousarray(part, np.float32) for part in parts()))
        quantized = [source for source in sources if source.kind not in _FLOATS]
        for source in quantized:
            # A stack's share is as large as the result.
            share = 4 * prod(shape) // len(sources)
            cost = self.costs[source.kind.name]
            cost[0] += share * source.num_bytes // (4 * prod(source.shape))
            cost[1] += share

    def add_mxfp4(
        self,
        name: str,
        groups: tuple[int, int, int],
        codes: Callable[[], Parts],
        exponents: Callable[[], Parts],
    ) -> None:
        """Add a stack of matrices in MXFP4, of experts, rows and groups of columns; see `Mxfp4StackFormat`."""
        self.has_mxfp4 = True
        self._add(f"{name}_blocks", "U8", (*groups, 16), codes)
        self._add(f"{name}_scales", "U8", groups, exponents)

    def float_dtype(self) -> str:
        """The dtype in which most values are stored that are no blocks, by torch's name."""
        counts = {"F32": 0, "F16": 0, "BF16": 0}
        for tensor in self.tensors:
            if tensor.header.dtype in counts:
                counts[tensor.header.dtype] += prod(tensor.header.shape)
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return names[max(counts, key=lambda dtype: counts[dtype])]

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], parts: Callable[[], Parts]) -> None:
        self.tensors.append(StreamedTensor(name, TensorHeader(dtype, shape), parts))


@dataclass(frozen=True, slots=True)
class Tensor(Rule):
    """One tensor that stays as it is, or of a stack one per expert."""

    source: str
    name: str
    """A stack's has `{}` for the expert's number."""
    sizes: str
    """The dimensions' names, the slowest first."""
    heads: str = ""
    """The name of the number of rotated heads, whose rows are reordered; see `ResultTensors.add_rows`."""
    offset: float = 0.0
    """What GGUF has added to the values."""

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        return {self.source: tuple(sizes[name] for name in self.sizes.split())}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`."""
        tensor, name = tensors[self.source], prefix + self.name
        if "{}" in self.name:
            num_rows = tensor.shape[1]
            for expert in range(tensor.shape[0]):
                rows = range(expert * num_rows, (expert + 1) * num_rows)
                results.add_rows(name.replace("{}", str(expert)), tensor, [rows])
        elif self.offset:
            results.add_values(name, [tensor], tensor.shape, partial(_shifted, tensor, -self.offset))
        else:
            num_heads = sizes[self.heads] if self.heads else 0
            rows = range(tensor.num_rows)
            results.add_rows(name, tensor, [rows], shape=tensor.shape, num_rotated_heads=num_heads)


def convert_tensors(
    found: Mapping[str, GgufTensor], rules: Sequence[tuple[str, str, Rule]], sizes: Sizes, results: ResultTensors
) -> None:
    """Add to `results` what becomes of all tensors.

    Args:
        found: The file's tensors, by name.
        rules: With each rule the prefixes of names, in the file and here.

    Raises:
        UnexpectedTensorsError: the tensors are not those of the rules.
    """
    expected = {prefix + name: shape for prefix, _, rule in rules for name, shape in rule.shapes(sizes).items()}
    _check(found, expected)
    for prefix, name_prefix, rule in rules:
        sources = {name: replace(found[prefix + name], shape=shape) for name, shape in rule.shapes(sizes).items()}
        rule.convert(sources, name_prefix, sizes, results)


def read_values(tensor: GgufTensor, first: int, last: int) -> npt.NDArray[np.float32]:
    """Rows `first` up to but not including `last`, in float32."""
    return np.asarray(dequantize(_typed(tensor.read(first, last), tensor.kind), tensor.kind), np.float32)


def _check(found: Mapping[str, GgufTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UnexpectedTensorsError` unless the tensors are those expected, and can be read."""
    if missing := expected.keys() - found.keys():
        raise UnexpectedTensorsError(f"lacks tensors: {_listed(missing)}")
    if unexpected := found.keys() - expected.keys():
        raise UnexpectedTensorsError(f"has unexpected tensors: {_listed(unexpected)}")
    for name, tensor in found.items():
        if _significant(tensor.shape) != _significant(expected[name]):
            raise UnexpectedTensorsError(f"has {name} of shape {list(tensor.shape)}, not {list(expected[name])}")
    for kind in {tensor.kind for tensor in found.values()} - _FLOATS.keys():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            names = (tensor.name for tensor in found.values() if tensor.kind is kind)
            raise UnexpectedTensorsError(f"has {next(names)} in {kind.name}, which cannot be read") from None


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without slowest dimensions of 1, which files may leave out."""
    first = next((index for index, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _listed(names: Sequence[str] | set[str]) -> str:
    """Sorted, and only some if they are many."""
    ordered, most = sorted(names), 8
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _read_parts(tensor: GgufTensor, rows: Sequence[range], *, head_rows: int) -> Parts:
    """Whole heads of `head_rows` rows at a time, their rotated pairs set apart."""
    num_rows = max(_PART_BYTES // (4 * tensor.shape[-1] * head_rows), 1) * head_rows
    for first, stop in ((first, run.stop) for run in rows for first in range(run.start, run.stop, num_rows)):
        stored = tensor.read(first, min(first + num_rows, stop))
        if head_rows > 1:
            # [heads, pairs, 2, ...] to [heads, 2, pairs, ...]; nothing changes within a row.
            heads = stored.reshape(-1, head_rows // 2, 2, tensor.row_bytes)
            stored = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(stored.shape)
        yield _typed(stored, tensor.kind)


def _with_columns(kind: GGMLQuantizationType, columns: Sequence[range], read: Callable[[], Parts]) -> Parts:
    """The parts with columns in this order; no block is cut."""
    num_values, _ = GGML_QUANT_SIZES[kind]
    blocks = np.concatenate([np.arange(each.start // num_values, each.stop // num_values) for each in columns])
    for part in read():
        stored = part.reshape(len(part), len(blocks), -1)
        yield np.ascontiguousarray(stored[:, blocks]).reshape(part.shape)


def _typed(stored: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """As the library that dequantises wants it: floats of types that numpy has, or else bytes."""
    types = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return stored.view(types[kind]) if kind in types else stored


def _shifted(tensor: GgufTensor, offset: float) -> Parts:
    yield read_values(tensor, 0, tensor.num_rows) + np.float32(offset)
