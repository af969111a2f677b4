"""A GGUF file's import is found by what the file is like, and not after the file or the import has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.model_files.imported_models import find_import, identify, import_directory, record_import
from shared.model_files.model_dir import CONFIG

PARTS = ["tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in PARTS:
        (tmp_path / name).write_bytes(b"GGUF" + name.encode())
    return tmp_path / PARTS[0]


@pytest.fixture
def directory(tmp_path: Path, source: Path) -> Path:
    """What the source is recorded to have become."""
    directory = import_directory(tmp_path / "cache", "0123456789abcdef" * 4, "tiny")
    directory.mkdir(parents=True)
    for name in ("manifest.json", "config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).touch()
    record_import(tmp_path / "cache", source, identify(source), directory)
    return directory


def test_an_import_is_found_by_any_spelling_of_the_path(tmp_path: Path, source: Path, directory: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert find_import(tmp_path / "cache", source) == find_import(tmp_path / "cache", tmp_path / "link" / PARTS[0])
    assert find_import(tmp_path / "cache", source) == directory
    assert directory.relative_to(tmp_path / "cache").parts == ("0123456789abcdef", "tiny")


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


def replace(path: Path) -> None:
    stat, content = path.stat(), path.read_bytes()
    path.rename(path.with_name("old"))
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [rewrite, replace, touch])
@pytest.mark.parametrize("part", PARTS)
def test_no_import_is_found_for_a_file_that_has_changed(
    tmp_path: Path, source: Path, directory: Path, change: Callable[[Path], None], part: str
) -> None:
    change(tmp_path / part)
    assert find_import(tmp_path / "cache", source) is None


def test_no_import_is_found_that_is_incomplete_or_was_never_made(tmp_path: Path, source: Path, directory: Path) -> None:
    assert find_import(tmp_path / "other", source) is None
    (directory / CONFIG).unlink()
    assert find_import(tmp_path / "cache", source) is None
    (record,) = (tmp_path / "cache" / "records").iterdir()
    record.write_text("[]", encoding="utf-8")
    assert find_import(tmp_path / "cache", source) is None


def test_a_missing_part_is_an_error_that_names_it(tmp_path: Path, source: Path, directory: Path) -> None:
    (tmp_path / PARTS[1]).unlink()
    with pytest.raises(FileNotFoundError, match=PARTS[1]):
        find_import(tmp_path / "cache", source)
