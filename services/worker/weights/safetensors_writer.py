"""Writes a safetensors file tensor by tensor, from parts: no tensor is in memory as a whole.

Source: safetensors' README, "Format".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.weights.weight_files import TensorHeader, digest_of, dtype_bytes

_METADATA = {"format": "pt"}
# The data begins where any dtype may.
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor that is made while it is written."""

    name: str
    header: TensorHeader
    parts: Callable[[], Iterator[npt.NDArray[Any]]]
    """Its contiguous values, little-endian, in order."""


def write_safetensors(
    path: Path, tensors: Sequence[StreamedTensor], on_progress: Callable[[float], None] = lambda _: None
) -> str:
    """Write the new file `path`, and return what `WeightFiles.digest()` returns for it.

    Args:
        path: The file, which must not exist.
        tensors: Of different names, in any order.
        on_progress: Called with the fraction of all bytes written, 0 to 1.

    Raises:
        OSError: it cannot be written; what there is of it is left.
    """
    # The widest dtypes first: each tensor then begins at a multiple of its dtype's size.
    ordered = sorted(tensors, key=lambda tensor: (-dtype_bytes(tensor.header.dtype), tensor.name))
    total = sum(tensor.header.num_bytes for tensor in ordered)
    digests, num_written = {}, 0
    with path.open("xb") as file:
        file.write(_header(ordered))
        for tensor in ordered:
            digest, end = hashlib.sha256(), num_written + tensor.header.num_bytes
            for part in tensor.parts():
                data = part.reshape(-1).view(np.uint8).data
                file.write(data)
                digest.update(data)
                num_written += len(data)
                on_progress(num_written / total)
            assert num_written == end, tensor.name
            digests[tensor.name] = (tensor.header, digest.digest())
        file.flush()
        os.fsync(file.fileno())
    return digest_of(digests)


def _header(tensors: Sequence[StreamedTensor]) -> bytes:
    """The file's first bytes."""
    entries: dict[str, Any] = {"__metadata__": _METADATA}
    start = 0
    for tensor in tensors:
        end = start + tensor.header.num_bytes
        shape = list(tensor.header.shape)
        entries[tensor.name] = {"dtype": tensor.header.dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
