"""Rules for gpt-oss's experts: stacks with gates and ups in turn, in MXFP4 or as plain floats.

A block of MXFP4 has its exponent and 16 bytes. In GGUF, byte i has value i in its low half and value i + 16 in its high
half; in Hugging Face's layout the values 2 i and 2 i + 1, and exponents are a tensor of their own.

Sources: ggml, src/ggml-common.h, `block_mxfp4`; transformers, integrations/mxfp4.py, `convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from services.worker.weights.gguf_import.gguf_file import GgufTensor
from services.worker.weights.gguf_import.tensors import Parts, ResultTensors, Rule, Sizes, read_values

_BLOCK_BYTES = 17
# Rows of each source that are converted at once.
_PART_ROWS = 256


@dataclass(frozen=True, slots=True)
class Stack(Rule):
    """Weights and biases of one projection of all experts, whose rows are those of the sources in turn."""

    sources: tuple[str, ...]
    """Without a suffix."""
    name: str
    sizes: str
    """The dimensions' names of a source, the slowest first."""

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        shape = tuple(sizes[name] for name in self.sizes.split())
        weights = {f"{source}.weight": shape for source in self.sources}
        return {**weights, **{f"{source}.bias": shape[:2] for source in self.sources}}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`."""
        del sizes
        name = prefix + self.name
        weights = [tensors[f"{source}.weight"] for source in self.sources]
        biases = [tensors[f"{source}.bias"] for source in self.sources]
        num_experts, num_rows, num_columns = weights[0].shape
        num_rows *= len(weights)
        results.add_values(f"{name}_bias", biases, (num_experts, num_rows), partial(_biases, biases))
        if results.keeps_formats and all(weight.kind is GGMLQuantizationType.MXFP4 for weight in weights):
            groups = (num_experts, num_rows, num_columns // 32)
            results.add_mxfp4(name, groups, partial(_codes, weights), partial(_exponents, weights))
        else:
            shape = (num_experts, num_columns, num_rows)
            results.add_values(name, weights, shape, partial(_transposed, weights))


def _codes(weights: Sequence[GgufTensor]) -> Parts:
    for blocks in _blocks(weights):
        low, high = blocks[..., 1:] & 0xF, blocks[..., 1:] >> 4
        values = np.concatenate((low, high), axis=-1)
        yield values[..., ::2] | values[..., 1::2] << 4


def _exponents(weights: Sequence[GgufTensor]) -> Parts:
    return (np.ascontiguousarray(blocks[..., 0]) for blocks in _blocks(weights))


def _blocks(weights: Sequence[GgufTensor]) -> Parts:
    """Rows of the sources in turn, [rows, groups, bytes of a block]."""
    for first in range(0, weights[0].num_rows, _PART_ROWS):
        last = min(first + _PART_ROWS, weights[0].num_rows)
        rows = np.stack([weight.read(first, last) for weight in weights], axis=1)
        yield rows.reshape(len(weights) * (last - first), -1, _BLOCK_BYTES)


def _transposed(weights: Sequence[GgufTensor]) -> Parts:
    """An expert at a time, inputs first."""
    num_rows = weights[0].shape[1]
    for expert in range(weights[0].shape[0]):
        yield _in_turn([read_values(weight, expert * num_rows, (expert + 1) * num_rows) for weight in weights]).T


def _biases(biases: Sequence[GgufTensor]) -> Parts:
    """All of them, [experts, rows]."""
    yield _in_turn([read_values(bias, 0, bias.num_rows).T for bias in biases]).T


def _in_turn(rows: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """[rows, ...] of each, in turn."""
    return np.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])
