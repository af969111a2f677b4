"""How the files of a model are told from others: by their states where those are sure to move, else by contents."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.weights.packed import sources
from services.worker.weights.packed.sources import identify_sources

CONTENT = b"weights" * 1000


def identify(*paths: Path) -> list[str]:
    return identify_sources(paths, num_threads=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def has_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on overlay and network file systems, whichever this machine's is."""
    monkeypatch.setattr(sources, "_LOCAL_FILE_SYSTEMS", frozenset())


@pytest.fixture
def has_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a local file system."""
    monkeypatch.setattr(sources, "_is_local", lambda _: True)


def rewrite(path: Path, content: bytes) -> None:
    """Put other contents of the same length in place, and the times back that can be set."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path, content: bytes) -> None:
    """As `rewrite`, with another file of the same name."""
    status, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(content)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.usefixtures("has_no_states")
def test_contents_count_where_states_say_little(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copyfile(path, copy)
    assert identify(path, copy) == [hashlib.sha256(CONTENT).hexdigest()] * 2


@pytest.mark.parametrize("change", [rewrite, replace])
@pytest.mark.usefixtures("has_no_states")
def test_a_change_that_leaves_length_and_times_is_seen_by_contents(
    path: Path, change: Callable[[Path, bytes], None]
) -> None:
    before = identify(path)
    change(path, CONTENT[::-1])
    assert identify(path) != before
    change(path, CONTENT)
    assert identify(path) == before


@pytest.mark.parametrize("change", [rewrite, replace])
@pytest.mark.usefixtures("has_states")
def test_a_change_that_leaves_length_and_times_is_seen_by_states(
    path: Path, change: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify(path)
    assert identify(path) == before
    change(path, CONTENT[::-1])
    after = identify(path)
    assert after != before
    monkeypatch.setattr(sources, "_boot_id", lambda: "another boot")
    assert identify(path)[0].split()[-5:] == after[0].split()[-5:]
    assert identify(path) != after


@pytest.mark.usefixtures("has_states")
def test_contents_count_without_a_boots_id(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_boot_id", lambda: "")
    assert identify(path) == [hashlib.sha256(CONTENT).hexdigest()]
