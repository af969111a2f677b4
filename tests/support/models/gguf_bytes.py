"""GGUF files byte by byte: headers of any contents, and files with other metadata."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.weights.gguf_import.gguf_file import GgufFile, GgufTensor

U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    shape_bytes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + shape_bytes + struct.pack("<IQ", kind, offset)


def header(*parts: bytes, num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(parts)


@dataclass(frozen=True, repr=False)
class SmallFile:
    name: str
    content: bytes
    metadata: Mapping[str, Any]
    tensors: Sequence[GgufTensor]

    def __repr__(self) -> str:
        return self.name

    @property
    def header_bytes(self) -> int:
        return min(each.offset for each in self.tensors)

    def with_metadata(self, metadata: Mapping[str, Any]) -> bytes:
        """The same file with other metadata, in the widest types."""
        entries = [entry(key.encode(), *packed(value)) for key, value in metadata.items()]
        places = [
            tensor(each.name.encode(), each.shape[::-1], each.kind, each.offset - self.header_bytes)
            for each in self.tensors
        ]
        head = header(*entries, *places, num_tensors=len(places), num_entries=len(entries))
        return head + bytes(-len(head) % 32) + self.content[self.header_bytes :]


def packed(value: Any) -> tuple[int, bytes]:
    """The number of a type, and the bytes of a value."""
    if isinstance(value, list):
        kinds = [packed(each) for each in value] or [(U32, b"")]
        return ARRAY, struct.pack("<IQ", kinds[0][0], len(value)) + b"".join(each for _, each in kinds)
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, str):
        return STRING, text(value.encode())
    return (12, struct.pack("<d", value)) if isinstance(value, float) else (11, struct.pack("<q", value))


def small_file(name: str, path: Path) -> SmallFile:
    with GgufFile(path) as file:
        return SmallFile(name, path.read_bytes(), file.metadata, file.tensors)
