"""Reads GGUF files: the header is checked whole before anything is believed, and tensors are read in parts.

Nothing is mapped, so that a file that shrinks is an error and not a signal, and memory is needed only for the part of a
tensor that a caller asks for.

Source: ggml, docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# What a file may ask for, far above what any model needs: the largest vocabularies have 300 000 tokens and take 20 MiB.
_MAX_HEADER_BYTES = 1 << 28
_MAX_ARRAY_VALUES = 1 << 23
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# The numbers of the other types of metadata, and numpy's of the same.
_SCALARS: Mapping[int, np.dtype[Any]] = {
    number: np.dtype(name)
    for number, name in enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"])
    if name
}
# The shortest entry of each kind: an empty name, the number of a type, and what belongs to it.
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class MalformedGgufError(Exception):
    """The file is not GGUF, or its header is malformed; the message says where, but not in which file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor and where its rows are."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """The slowest dimension first, unlike in the file."""
    file: BinaryIO
    offset: int

    @property
    def num_rows(self) -> int:
        """Rows of the last dimension."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        num_values, num_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // num_values * num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_bytes

    def read(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Read rows `first` up to but not including `last`, as they are stored: [rows, row_bytes].

        Raises:
            MalformedGgufError: the file has become shorter.
            OSError: it cannot be read.
        """
        rows = np.empty((last - first, self.row_bytes), np.uint8)
        self.file.seek(self.offset + first * self.row_bytes)
        if self.file.readinto(rows.data) != rows.nbytes:  # type: ignore[attr-defined]
            raise MalformedGgufError(f"the file ends within tensor {self.name}")
        return rows


class GgufFile:
    """One file. A context manager; tensors are read while it is open."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            MalformedGgufError: it is malformed, or the file is too short for its tensors.
            OSError: the file cannot be read.
        """
        self._stack = ExitStack()
        file = self._stack.enter_context(path.open("rb"))
        try:
            header = _HeaderReader(file, path.stat().st_size)
            self.metadata: Mapping[str, Any] = header.read_metadata()
            """Numbers, booleans and strings, and lists of these."""
            self.tensors: tuple[GgufTensor, ...] = header.read_tensors(self.metadata)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)


class _HeaderReader:
    """Reads a header from its start on, and never beyond the file's end."""

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self._left = min(file_bytes, _MAX_HEADER_BYTES)
        self._num_array_values = 0
        if self._read(4, "the magic number") != _MAGIC:
            raise MalformedGgufError("it does not begin with GGUF")
        (version,) = struct.unpack("<I", self._read(4, "the version"))
        if version not in _VERSIONS:
            is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            problem = "it is big-endian" if is_big_endian else f"it has version {version}"
            raise MalformedGgufError(f"{problem}; little-endian files of versions 2 and 3 are read")
        self._num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        self._num_entries = self._count("metadata entries", _MIN_ENTRY_BYTES)

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for number in range(self._num_entries):
            key = self._name(f"the key of metadata entry {number}")
            if key in metadata:
                raise MalformedGgufError(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._number(f"the type of {key}"), key)
        return metadata

    def read_tensors(self, metadata: Mapping[str, Any]) -> tuple[GgufTensor, ...]:
        """Read where the tensors are, after the metadata."""
        if self._num_tensors > _MAX_TENSORS:
            raise MalformedGgufError(f"it has {self._num_tensors} tensors; at most {_MAX_TENSORS} are read")
        found = [self._tensor(number) for number in range(self._num_tensors)]
        names = set[str]()
        for tensor in found:
            if tensor.name in names:
                raise MalformedGgufError(f"the tensor {tensor.name} occurs twice")
            names.add(tensor.name)
        alignment = _alignment(metadata)
        start = -(-self._file.tell() // alignment) * alignment
        placed = [_moved(tensor, start, alignment) for tensor in found]
        self._check_places(placed)
        return tuple(placed)

    def _check_places(self, tensors: list[GgufTensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise MalformedGgufError(f"the tensors {previous} and {tensor.name} overlap")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name
            if end > self._file_bytes:
                raise MalformedGgufError(
                    f"it is truncated: tensor {tensor.name} ends at byte {end}, the file at {self._file_bytes}"
                )

    def _tensor(self, number: int) -> GgufTensor:
        """A tensor whose offset is still that from the start of the data."""
        name = self._name(f"the name of tensor {number}")
        num_dimensions = self._number(f"the number of dimensions of {name}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise MalformedGgufError(f"the tensor {name} has {num_dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        shape = struct.unpack(f"<{num_dimensions}Q", self._read(8 * num_dimensions, f"the shape of {name}"))[::-1]
        number_of_kind, offset = struct.unpack("<IQ", self._read(12, f"the type and offset of {name}"))
        try:
            kind = GGMLQuantizationType(number_of_kind)
            num_values, _ = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError):
            raise MalformedGgufError(f"the tensor {name} has type {number_of_kind}, which is not known") from None
        if 0 in shape or prod(shape) >= 1 << 62:
            raise MalformedGgufError(f"the tensor {name} has the impossible shape {list(shape)}")
        if shape[-1] % num_values:
            raise MalformedGgufError(
                f"the tensor {name} has rows of {shape[-1]} values, not of whole blocks of {num_values} in {kind.name}"
            )
        return GgufTensor(name, kind, shape, self._file, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._scalars(kind, 1, key)[0]
        of_kind, num_values = struct.unpack("<IQ", self._read(12, f"the array {key}"))
        self._num_array_values += num_values
        if self._num_array_values > _MAX_ARRAY_VALUES:
            raise MalformedGgufError(f"the array {key} has {num_values} values; at most {_MAX_ARRAY_VALUES} are read")
        if of_kind == _ARRAY:
            raise MalformedGgufError(f"{key} is an array of arrays, which no model has")
        if of_kind == _STRING:
            return [self._string(key) for _ in range(num_values)]
        return self._scalars(of_kind, num_values, key)

    def _scalars(self, kind: int, num_values: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise MalformedGgufError(f"{key} has type {kind}, which is not known")
        data = self._read(_SCALARS[kind].itemsize * num_values, key)
        values: list[Any] = np.frombuffer(data, _SCALARS[kind]).tolist()
        return values

    def _string(self, what: str) -> str:
        (num_bytes,) = struct.unpack("<Q", self._read(8, what))
        # Tokens of some vocabularies are parts of characters.
        return self._read(num_bytes, what).decode("utf-8", errors="replace")

    def _name(self, what: str) -> str:
        (num_bytes,) = struct.unpack("<Q", self._read(8, what))
        if num_bytes > _MAX_NAME_BYTES:
            raise MalformedGgufError(f"{what} has {num_bytes} bytes, more than {_MAX_NAME_BYTES}")
        try:
            return self._read(num_bytes, what).decode()
        except UnicodeDecodeError:
            raise MalformedGgufError(f"{what} is not UTF-8") from None

    def _number(self, what: str) -> int:
        (number,) = struct.unpack("<I", self._read(4, what))
        return int(number)

    def _count(self, what: str, min_bytes: int) -> int:
        (count,) = struct.unpack("<Q", self._read(8, f"the number of {what}"))
        if count * min_bytes > self._left:
            raise MalformedGgufError(f"it has {count} {what}, for which it is too short")
        return int(count)

    def _read(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._left:
            if self._file_bytes > _MAX_HEADER_BYTES:
                raise MalformedGgufError(f"{what} exceeds the {_MAX_HEADER_BYTES} bytes that a header may have")
            raise MalformedGgufError(f"it is truncated, or malformed: {what} has {num_bytes} bytes, beyond its end")
        self._left -= num_bytes
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise MalformedGgufError(f"it is truncated: it ends within {what}")
        return data


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise MalformedGgufError(f"general.alignment is {alignment!r}, not a power of two up to {_MAX_ALIGNMENT}")
    return alignment


def _moved(tensor: GgufTensor, start: int, alignment: int) -> GgufTensor:
    if tensor.offset % alignment:
        raise MalformedGgufError(f"the tensor {tensor.name} has offset {tensor.offset}, no multiple of {alignment}")
    return GgufTensor(tensor.name, tensor.kind, tensor.shape, tensor.file, start + tensor.offset)
