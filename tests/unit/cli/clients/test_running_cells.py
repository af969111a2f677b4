"""Commands find the running cells of this user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest

from services.cli.clients.running_cells import (
    NoCellError,
    RunningCell,
    Target,
    explain_no_cell,
    find_cells,
    find_target,
    publish_cell,
)
from shared.errors import NotReadyError
from shared.network.statuses import STATUS_DETAILS_KEY, to_status
from tests.support.system.processes import ROOT, module_environment

OLD, NEW = (RunningCell(name, f"unix:/{name}/tokenizer", f"unix:/{name}/cell") for name in ("old", "new"))

# A launcher that will be killed.
LAUNCHER = """
import os, signal, sys
from pathlib import Path
from services.cli.clients.running_cells import RunningCell, publish_cell
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


def address_of(cell: RunningCell) -> str:
    return cell.address


def test_a_command_calls_the_newest_cell_and_lists_the_others(
    temp_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(publish_cell(make_directory(temp_dir, "1"), OLD))
        os.utime(temp_dir / "lockstep-1" / "cell.json", (1, 1))
        stack.enter_context(publish_cell(make_directory(temp_dir, "2"), NEW))
        target = find_target(None, address_of, "x:1")
        assert capsys.readouterr().err == f"note: old is running here too: --target={OLD.address}\n"
        # An address that the user gave is called as it is; the model is known if it is a cell's that runs here.
        assert find_target(OLD.address, address_of, "x:1") == Target(OLD.address, model="old")
        assert find_target("y:2", address_of, "x:1") == Target("y:2")
    assert (target.address, target.model) == (NEW.address, "new")
    assert target.advice == "the cell of new does not answer at unix:/new/tokenizer: it may still be starting"


async def test_where_no_cell_runs_a_failed_call_says_what_to_do(temp_dir: Path) -> None:
    target = find_target(None, address_of, "x:1")
    assert target.address == "x:1"
    nothing = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
    with pytest.raises(NoCellError, match=r"nothing answers at x:1: start a cell with `lockstep serve MODEL`, or give"):
        async with explain_no_cell(target):
            raise nothing
    with pytest.raises(grpc.aio.AioRpcError):
        async with explain_no_cell(Target("y:2")):
            raise nothing


async def test_what_a_cell_answers_is_told_as_it_is() -> None:
    trailing = grpc.aio.Metadata((STATUS_DETAILS_KEY, to_status(NotReadyError("not yet")).SerializeToString()))
    with pytest.raises(grpc.aio.AioRpcError):
        async with explain_no_cell(Target("x:1", advice="start a cell")):
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing)


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
