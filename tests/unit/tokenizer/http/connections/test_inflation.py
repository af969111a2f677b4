"""Compressed bodies: what they may inflate to, and how they may be cut."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.http.connections import inflation
from services.tokenizer.http.connections.inflation import MAX_PIECE_BYTES, BrokenBodyError, Gzip, Zstd
from services.tokenizer.http.connections.limits import MAX_BODY_BYTES
from tests.support.tokenizer.http_client import MESSAGES, HttpService

CHAT = "/v1/chat/completions"
HEADERS = {"Content-Type": "application/json", "Content-Encoding": "gzip"}


def inflated(data: bytes, cuts: list[int]) -> bytes:
    inflater, whole, begin = Gzip(), bytearray(), 0
    for end in [*sorted(cuts), len(data)]:
        for piece in inflater.push(data[begin:end]):
            assert 0 < len(piece) <= MAX_PIECE_BYTES
            whole += piece
        begin = end
    inflater.end()
    return bytes(whole)


@given(st.data(), st.lists(st.binary(max_size=300), max_size=3), st.integers(0, 300_000))
def test_members_come_out_whole_however_they_are_cut(data: st.DataObject, members: list[bytes], num_zeros: int) -> None:
    parts = [*members, bytes(num_zeros)]
    packed = b"".join(gzip.compress(part) for part in parts)
    cuts = data.draw(st.lists(st.integers(0, len(packed)), max_size=5))
    assert inflated(packed, cuts) == b"".join(parts)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_what_ends_too_early_is_broken(text: bytes, data: st.DataObject) -> None:
    packed = gzip.compress(text)
    end = data.draw(st.integers(1, len(packed) - 1))
    with pytest.raises(BrokenBodyError):
        inflated(packed[:end], [])


@pytest.mark.parametrize(
    "data",
    [b"{}", zlib.compress(b"{}"), gzip.compress(b"{}") + b"x", bytes(20)],
    ids=["plain", "zlib", "a rest", "zeros"],
)
def test_what_is_no_gzip_is_broken(data: bytes) -> None:
    with pytest.raises(BrokenBodyError):
        inflated(data, [])


async def test_a_compressed_body_means_the_same(http: HttpService) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1, "user": "x" * 100_000}).encode()
    plain = await http.ask("POST", "/tokenize", data=b'{"prompt": "hi"}', headers={"Content-Type": "application/json"})
    packed = await http.ask("POST", "/tokenize", data=gzip.compress(b'{"prompt": "hi"}'), headers=HEADERS)
    assert (packed.status, packed.value) == (200, plain.value)
    rendered = await http.ask("POST", f"{CHAT}/render", data=gzip.compress(body), headers=HEADERS)
    assert rendered.status == 200


@pytest.mark.parametrize(
    ("make_data", "status"),
    [
        (lambda: gzip.compress(bytes(200 * MAX_BODY_BYTES // 4)), 413),
        (lambda: gzip.compress(b" " * MAX_BODY_BYTES + b"{}"), 413),
        # Nothing comes of it.
        (lambda: gzip.compress(b"") * (MAX_BODY_BYTES // 20 + 1), 413),
        (lambda: gzip.compress(b"{}")[:-3], 400),
        (lambda: b"{}", 400),
        (lambda: gzip.compress(b"\xff"), 400),
        (lambda: gzip.compress(b'{"a":' * 10_000), 400),
    ],
    ids=["zeros", "too much", "nothing", "cut", "plain", "no text", "deep"],
)
async def test_every_limit_holds_for_what_is_inflated(
    http: HttpService, make_data: Callable[[], bytes], status: int
) -> None:
    answer = await http.ask("POST", CHAT, data=make_data(), headers=HEADERS)
    assert answer.status == status


async def test_another_encoding_is_refused_with_those_that_can_be_read(http: HttpService) -> None:
    for encoding in ("br", "deflate", "gzip, gzip"):
        answer = await http.ask(
            "POST", CHAT, data=b"{}", headers=HEADERS | {"Content-Encoding": encoding}, skip_auto_headers=()
        )
        assert answer.status == 415
        assert answer.headers["Accept-Encoding"].startswith("gzip")


async def test_a_mark_of_the_byte_order_is_ignored(http: HttpService) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await http.ask("POST", "/tokenize", data=b'\xef\xbb\xbf{"prompt": "hi"}', headers=headers)
    assert answer.status == 200


@pytest.mark.skipif("zstd" not in inflation.INFLATERS, reason="Python's library for zstd is its own from 3.14 on")
def test_zstd_frames_come_out_whole_and_large_windows_are_refused() -> None:
    library = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    packed = library.compress(bytes(200_000)) + library.compress(b"end")
    inflater = Zstd()
    pieces = [piece for at in range(0, len(packed), 7) for piece in inflater.push(packed[at : at + 7])]
    inflater.end()
    assert b"".join(pieces) == bytes(200_000) + b"end"
    assert max(map(len, pieces)) <= MAX_PIECE_BYTES
    parameter = library.CompressionParameter
    large = library.compress(bytes(2**25), options={parameter.window_log: 27, parameter.content_size_flag: 0})
    for broken in (b"no frame at all", large):
        with pytest.raises(BrokenBodyError):
            list(Zstd().push(broken))
    cut = Zstd()
    list(cut.push(packed[:-2]))
    with pytest.raises(BrokenBodyError):
        cut.end()
