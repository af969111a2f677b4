"""Commands find the running cells of this user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shared.cli.clients.running_cells import RunningCell, find_cells, publish_cell
from tests.support.system.processes import ROOT, module_environment

OLD, NEW = (RunningCell(name, f"unix:/{name}/tokenizer", f"unix:/{name}/cell") for name in ("old", "new"))

# A launcher that will be killed.
LAUNCHER = """
import os, signal, sys
from pathlib import Path
from shared.cli.clients.running_cells import RunningCell, publish_cell
with publish_cell(Path(sys.argv[1]), RunningCell("m", "a", "b")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_directory(temp_dir: Path, name: str) -> Path:
    directory = temp_dir / f"lockstep-{name}"
    directory.mkdir(mode=0o700)
    return directory


def test_running_cells_are_found_newest_first_and_not_after_their_end(temp_dir: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(publish_cell(make_directory(temp_dir, "1"), OLD))
        os.utime(temp_dir / "lockstep-1" / "cell.json", (1, 1))
        with publish_cell(make_directory(temp_dir, "2"), NEW):
            assert find_cells() == [NEW, OLD]
        assert find_cells() == [OLD]
    assert find_cells() == []


@pytest.mark.process
def test_the_files_of_a_killed_launcher_are_not_a_cell(temp_dir: Path) -> None:
    directory = make_directory(temp_dir, "killed")
    subprocess.run([sys.executable, "-c", LAUNCHER, str(directory)], cwd=ROOT, env=module_environment(), check=False)
    assert (directory / "cell.json").exists()
    assert find_cells() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "x"}'])
def test_an_unrelated_file_is_skipped(temp_dir: Path, text: str) -> None:
    directory = make_directory(temp_dir, "odd")
    with publish_cell(directory, OLD):
        (directory / "cell.json").write_text(text)
        assert find_cells() == []


def test_another_users_directory_is_not_read(temp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_directory(temp_dir, "theirs")
    # Opening the pipe would wait for a writer.
    os.mkfifo(directory / "cell.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert find_cells() == []
