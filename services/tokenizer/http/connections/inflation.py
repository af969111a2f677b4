"""Inflates bodies while they arrive, in pieces of a bounded size, so that a limit holds for what has been inflated."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

MAX_PIECE_BYTES = 64 * 1024
"""Bytes that are inflated at once."""
# 8 MiB: larger windows than a body can use would take memory.
_MAX_WINDOW_LOG = 23
_GZIP_BITS = 16 + zlib.MAX_WBITS


class BrokenBodyError(ValueError):
    """A body that is not of its encoding, or ends too early."""


class Inflater(Protocol):
    """Inflates one body."""

    def push(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes inflate to, in pieces of at most 64 KiB; raises BrokenBodyError."""

    def end(self) -> None:
        """Raises BrokenBodyError unless the body is whole."""


class Plain:
    """Bodies that are not compressed."""

    def push(self, data: bytes) -> Iterator[bytes]:
        """See `Inflater`."""
        yield data

    def end(self) -> None:
        """See `Inflater`."""


class Gzip:
    """Members of gzip, one after another.

    Source: RFC 1952, section 2.2.
    """

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP_BITS)
        self._is_between = True
        """Whether no member has begun that has not ended."""

    def push(self, data: bytes) -> Iterator[bytes]:
        """See `Inflater`."""
        while data:
            if self._is_between:
                self._member, self._is_between = zlib.decompressobj(_GZIP_BITS), False
            try:
                piece = self._member.decompress(data, MAX_PIECE_BYTES)
            except zlib.error:
                raise BrokenBodyError("no gzip") from None
            if piece:
                yield piece
            self._is_between = self._member.eof
            data = self._member.unused_data if self._is_between else self._member.unconsumed_tail

    def end(self) -> None:
        """See `Inflater`."""
        if not self._is_between:
            raise BrokenBodyError("gzip that does not end")


class Zstd:
    """Frames of zstd, one after another."""

    def __init__(self) -> None:
        self._library: Any = import_module(_zstd_module())
        self._frame: Any = None

    def push(self, data: bytes) -> Iterator[bytes]:
        """See `Inflater`."""
        options = {self._library.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
        while data or (self._frame is not None and not self._frame.needs_input):
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor(options=options)
            try:
                piece = self._frame.decompress(data, MAX_PIECE_BYTES)
            except self._library.ZstdError:
                raise BrokenBodyError("no zstd") from None
            if piece:
                yield piece
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None

    def end(self) -> None:
        """See `Inflater`."""
        if self._frame is not None:
            raise BrokenBodyError("zstd that does not end")


def _zstd_module() -> str:
    """The library's name, Python's own from 3.14 on; empty if there is none."""
    names = (("compression", "compression.zstd"), ("backports", "backports.zstd"))
    return next((name for parent, name in names if find_spec(parent) and find_spec(name)), "")


INFLATERS: Mapping[str, type[Inflater]] = {
    "identity": Plain,
    "gzip": Gzip,
    "x-gzip": Gzip,
    **({"zstd": Zstd} if _zstd_module() else {}),
}
"""Inflaters by the names of encodings in `Content-Encoding`."""
ACCEPTED = ", ".join(name for name in INFLATERS if name not in ("identity", "x-gzip"))
"""What `Accept-Encoding` says in an answer that refuses another encoding (RFC 7694, section 3)."""
