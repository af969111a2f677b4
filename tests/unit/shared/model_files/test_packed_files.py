"""Files of packed weights, below what is in them."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model_files.packed_files import (
    ALIGNMENT,
    CHUNK_BYTES,
    PackedDirectory,
    default_packed_dir,
    file_name,
    read_header,
)
from tests.support.system.processes import ROOT, module_environment, python_command

RECIPE = "ab" * 32

# Writes a file as a worker does, and kills itself at the given step of it; a step is a call of one of these functions.
KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from shared.model_files import packed_files
left = int(sys.argv[2])
def dying(function):
    def call(*args, **kwargs):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*args, **kwargs)
    return call
packed_files.zlib.crc32 = dying(packed_files.zlib.crc32)
packed_files.json.dumps = dying(packed_files.json.dumps)
packed_files.os.open = dying(os.open)
packed_files.os.link = dying(os.link)
packed_files.PackedFile.close = dying(packed_files.PackedFile.close)
with packed_files.PackedDirectory(Path(sys.argv[1])) as directory:
    file = directory.create(1 << 30)
    for number in range(20):
        file.append(memoryview(bytes([number]) * 1_000_000))
    file.publish("ab" * 32, {})
    file.close()
"""


def write(directory: PackedDirectory, parts: list[bytes], recipe: str = RECIPE) -> list[int]:
    file = directory.create(1 << 40)
    places = [file.append(memoryview(part)) for part in parts]
    file.publish(recipe, {"parts": len(parts)})
    file.close()
    return places


def kill_at(directory: Path, step: int) -> bool:
    """Run the writer until a step; returns whether it was killed there, or else had fewer."""
    command = python_command("-c", KILLED_WRITER, str(directory), str(step))
    process = subprocess.run(command, env=module_environment(), cwd=ROOT, check=False)
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode != 0


def check_nothing_or_whole(path: Path) -> None:
    """A folder after a kill has no file, or a whole one, and can be written to."""
    names = [each.name for each in path.iterdir()] if path.exists() else []
    assert names in ([], [file_name(RECIPE)])
    with PackedDirectory(path) as directory:
        for name in names:
            num_bytes, header = read_header(directory.open(name))
            assert num_bytes >= 20_000_000
            assert header["recipe"] == RECIPE
            directory.remove(name)
        write(directory, [b"again"])


@pytest.mark.process
@pytest.mark.parametrize("step", [1, 9, 20])
def test_a_writer_that_is_killed_leaves_a_whole_file_or_none(tmp_path: Path, step: int) -> None:
    assert kill_at(tmp_path / "cache", step)
    check_nothing_or_whole(tmp_path / "cache")


@pytest.mark.proof
@pytest.mark.process
def test_a_writer_that_is_killed_at_any_step_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    random.seed(1)
    num_steps = next(step for step in range(1000) if not kill_at(tmp_path / f"{step}", step))
    for number in range(100):
        path = tmp_path / f"again-{number}"
        assert kill_at(path, random.randrange(num_steps))
        check_nothing_or_whole(path)
    for step in range(num_steps):
        check_nothing_or_whole(tmp_path / f"{step}")


SIZES = st.sampled_from([0, 1, 63, 64, 1000, CHUNK_BYTES - 64, CHUNK_BYTES, CHUNK_BYTES + 1])


@settings(max_examples=10)
@given(sizes=st.lists(SIZES, max_size=3))
def test_runs_are_aligned_and_have_a_checksum_for_each_chunk(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("cache") / "packed"
    with PackedDirectory(path) as directory:
        places = write(directory, [bytes([number + 1]) * size for number, size in enumerate(sizes)])
        num_bytes, header = read_header(directory.open(file_name(RECIPE)))
    assert not any(place % ALIGNMENT for place in places)
    assert len(header["checksums"]) == -(-num_bytes // CHUNK_BYTES)
    content = (path / file_name(RECIPE)).read_bytes()
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        assert content[place : place + size] == bytes([number + 1]) * size


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    with PackedDirectory(path) as directory:
        write(directory, [b"first"])
        write(directory, [b"other"])
        assert (path / file_name(RECIPE)).read_bytes().startswith(b"first")
        assert [entry.name for entry in directory.entries()] == [file_name(RECIPE)]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    with PackedDirectory(tmp_path / "packed") as directory:
        (tmp_path / "packed" / "notes").write_bytes(bytes(100))
        assert not directory.entries()
        assert not directory.trim(0)
    assert (tmp_path / "packed" / "notes").exists()


def test_the_folder_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_packed_dir() == tmp_path / "lockstep" / "packed"
    # The specification: a path that is not absolute is ignored.
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_packed_dir() == tmp_path / "home" / ".cache" / "lockstep" / "packed"


def test_a_folder_that_is_made_is_its_users_alone(tmp_path: Path) -> None:
    with PackedDirectory(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
