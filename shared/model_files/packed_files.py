"""Files of packed weights, which outlive the process that packed them: their folder, and how they are laid out.

A file is data, then a header in JSON, then a trailer: a magic number, the lengths of data and header, and the header's
CRC-32. The header has `recipe`, a digest of all that the data was made of; `checksums`, the CRC-32 of each
`CHUNK_BYTES` of data; and what the writer adds. It has no name until it is whole, and is never written again: a process
that is killed leaves nothing behind. A file that is removed stays readable to those that have it open.

Nothing is flushed to the disk. After a loss of power a file may have its name but not its contents, which its checksums
show.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK_BYTES = 8 << 20
"""Data with one checksum."""
ALIGNMENT = 64
"""Every run of data begins at a multiple of this."""

_SUFFIX = ".packed"
_NAME = re.compile(r"[0-9a-f]{32}\.packed")
_MAGIC = b"lockpack"
# Lengths of data and header, and the header's CRC-32.
_TRAILER = struct.Struct("<8sQQI")
# A header of a model with 100,000 matrices has 30 MB.
_MAX_HEADER_BYTES = 1 << 28


class PackedFileError(Exception):
    """A file is not what was written; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class PackedCache:
    """Where packed weights are kept."""

    directory: Path | None
    """None means the user's cache."""
    max_bytes: int
    """The most bytes of all files together."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of packed weights."""

    name: str
    num_bytes: int
    used_at: float
    """When it was last written or read, in seconds since 1970."""


def default_packed_dir() -> Path:
    """The folder of packed weights, by the XDG Base Directory Specification, version 0.8.

    Raises:
        RuntimeError: the user has no home.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return base / "lockstep" / "packed"


def file_name(recipe: str) -> str:
    """The name of the file for a recipe, in hex."""
    return recipe[:32] + _SUFFIX


class PackedDirectory:
    """A folder of packed weights. A context manager."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open the folder, and make it if it is missing.

        Args:
            create: Whether to make it.

        Raises:
            OSError: there is none, or others than its user could write to it: kernels are given addresses in what is
                read from it.
        """
        self.path = path
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(self._fd)
            raise OSError(errno.EPERM, "not this user's alone, with mode 0700", str(path))

    def __enter__(self) -> PackedDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; files of it that are open stay so."""
        os.close(self._fd)

    def entries(self) -> list[Entry]:
        """All files, the one used last first."""
        found = []
        for name in os.listdir(self._fd):  # noqa: PTH208 - the folder that was checked, whatever its path is now
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if _NAME.fullmatch(name) and stat.S_ISREG(status.st_mode):
                    found.append(Entry(name, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: (-entry.used_at, entry.name))

    def open(self, name: str) -> int:
        """A descriptor of a file, for reading.

        Raises:
            OSError: it cannot be opened; FileNotFoundError: there is none.
            PackedFileError: it is no file of this user's alone.
        """
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            os.close(fd)
            raise PackedFileError("others could have written it")
        return fd

    def remove(self, name: str) -> None:
        """Remove a file; it may be gone already.

        Raises:
            OSError: it cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def trim(self, max_bytes: int) -> list[Entry]:
        """Remove the files that were not used for the longest time until all together have at most `max_bytes`.

        Returns:
            What was removed.

        Raises:
            OSError: a file cannot be removed.
        """
        removed, total = [], 0
        for entry in self.entries():
            total += entry.num_bytes
            if total > max_bytes:
                self.remove(entry.name)
                removed.append(entry)
        return removed

    def create(self, max_bytes: int) -> PackedFile:
        """A new file without a name.

        Raises:
            OSError: it cannot be made, or the file system has no files without names.
        """
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        return PackedFile(fd, self._fd, max_bytes)


class PackedFile:
    """A file that is being written. After an OSError nothing but `close` may be called."""

    def __init__(self, fd: int, directory_fd: int, max_bytes: int) -> None:
        self._file = os.fdopen(fd, "wb", buffering=1 << 20)
        self._directory_fd = directory_fd
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._checksum = 0
        self._checksums: list[int] = []

    def append(self, data: memoryview) -> int:
        """Write a run of bytes; returns where it begins.

        Raises:
            OSError: it cannot be written, or the file has reached its bound.
        """
        self._write(memoryview(bytes(-self._num_bytes % ALIGNMENT)))
        place = self._num_bytes
        self._write(data)
        return place

    def publish(self, recipe: str, header: Mapping[str, Any]) -> int:
        """Write the header, and give the file its name; another process may have been first.

        Returns:
            The file's length in bytes.

        Raises:
            OSError: it cannot be written.
        """
        checksums = [*self._checksums, self._checksum] if self._num_bytes % CHUNK_BYTES else self._checksums
        text = json.dumps({**header, "recipe": recipe, "checksums": checksums}, separators=(",", ":")).encode()
        self._file.write(text)
        self._file.write(_TRAILER.pack(_MAGIC, self._num_bytes, len(text), zlib.crc32(text)))
        self._file.flush()
        source = f"/proc/self/fd/{self._file.fileno()}"
        with contextlib.suppress(FileExistsError):
            os.link(source, file_name(recipe), dst_dir_fd=self._directory_fd, follow_symlinks=True)
        return self._num_bytes + len(text) + _TRAILER.size

    def close(self) -> None:
        """Close the file; without a name it is gone."""
        # What is in its buffer may be what did not fit.
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, data: memoryview) -> None:
        if self._num_bytes + len(data) > self._max_bytes:
            raise OSError(errno.EFBIG, "more than the bound for all packed weights")
        while len(data):
            part = data[: CHUNK_BYTES - self._num_bytes % CHUNK_BYTES]
            self._file.write(part)
            self._checksum = zlib.crc32(part, self._checksum)
            self._num_bytes += len(part)
            data = data[len(part) :]
            if self._num_bytes % CHUNK_BYTES == 0:
                self._checksums.append(self._checksum)
                self._checksum = 0


def read_header(fd: int) -> tuple[int, dict[str, Any]]:
    """The number of bytes of data, which are the first ones, and the header, of the right form and length.

    Raises:
        OSError: the file cannot be read.
        PackedFileError: it is not whole, or has changed.
    """
    num_bytes = os.fstat(fd).st_size
    trailer = os.pread(fd, _TRAILER.size, max(num_bytes - _TRAILER.size, 0))
    if len(trailer) != _TRAILER.size:
        raise PackedFileError("it is too short")
    magic, num_data_bytes, num_header_bytes, checksum = _TRAILER.unpack(trailer)
    if magic != _MAGIC or num_data_bytes + num_header_bytes + _TRAILER.size != num_bytes:
        raise PackedFileError("it is not whole")
    if num_header_bytes > _MAX_HEADER_BYTES:
        raise PackedFileError("its header is too long")
    text = os.pread(fd, num_header_bytes, num_data_bytes)
    if zlib.crc32(text) != checksum:
        raise PackedFileError("its header has changed")
    header = json.loads(text)
    if len(header["checksums"]) != -(-num_data_bytes // CHUNK_BYTES):
        raise PackedFileError("it has another number of checksums than of chunks")
    return num_data_bytes, header
