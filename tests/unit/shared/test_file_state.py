"""Files that are read again while a service runs, and what may stand in their place."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.file_state import read_regular_file
from shared.network.tls import TlsError
from shared.network.tls import _read_file as read_tls_file
from shared.tenants.client_keys import ClientKeysError, read_key_file
from shared.tenants.client_keys import _read as read_client_keys


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


NOT_REGULAR: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a socket": make_socket,
    "nothing": lambda _: None,
}
# Each reader of a file that services read again, and what it raises.
READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "a file": (read_regular_file, OSError),
    "clients' keys": (read_client_keys, ClientKeysError),
    "a client's own key": (read_key_file, ClientKeysError),
    "a certificate": (lambda path: read_tls_file("--tls-cert", path), TlsError),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, reader: str, kind: str) -> None:
    read, expected = READERS[reader]
    NOT_REGULAR[kind](tmp_path / "target")
    link = tmp_path / "link"
    link.symlink_to("target")
    for path in (tmp_path / "target", link):
        with pytest.raises(expected):
            read(path)


def test_a_regular_file_is_read_by_way_of_symlinks(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "file").write_bytes(b"contents")
    (tmp_path / "file").symlink_to("..data/file")
    assert read_regular_file(tmp_path / "file") == b"contents"
