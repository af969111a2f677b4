"""`lockstep cache`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.cache import main
from shared.model_files.packed_files import PackedDirectory, file_name

RECIPES = ("a1" * 32, "b2" * 32)
NAMES = [file_name(recipe) for recipe in RECIPES]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "packed"
    with PackedDirectory(path) as directory:
        for recipe in RECIPES:
            file = directory.create(1 << 30)
            file.append(memoryview(bytes(1024**2)))
            labels = {"model_dir": "/models/\x1b[31mx", "quantization": "int8", "tp": "0/2", "ep": "none"}
            file.publish(recipe, {"labels": labels})
            file.close()
    return path


def run(cache: Path, *args: str) -> int:
    return main([*args, f"--packed-dir={cache}"])


def test_files_are_listed_with_what_they_are_of(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / NAMES[0]).write_bytes(b"damaged")
    assert run(cache, "ls") == 0
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in capsys.readouterr().out.splitlines()}
    assert sorted(rows) == NAMES
    assert rows[NAMES[1]][0] == "1.0"
    assert rows[NAMES[1]][2] == "tp 0/2 ep none int8 /models/?[31mx"
    assert rows[NAMES[0]][2].startswith("damaged: ")


def test_one_or_all_are_removed(cache: Path) -> None:
    assert run(cache, "rm", NAMES[0]) == 0
    assert [each.name for each in cache.iterdir()] == NAMES[1:]
    assert run(cache, "rm", "--all") == 0
    assert not list(cache.iterdir())


@pytest.mark.parametrize("name", ["none.packed", "../packed/x", "/etc/passwd"])
def test_what_is_no_file_of_packed_weights_is_refused(
    cache: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cache, "rm", NAMES[0], name) == 1
    assert name in capsys.readouterr().err
    assert len(list(cache.iterdir())) == 2


def test_a_missing_folder_has_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "missing", "ls") == 0
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "missing").exists()
    assert run(tmp_path / "missing", "rm", NAMES[0]) == 1


def test_a_folder_that_others_can_write_to_is_refused(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.chmod(0o777)
    assert run(cache, "ls") == 1
    assert "mode 0700" in capsys.readouterr().err
