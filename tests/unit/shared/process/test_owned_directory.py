"""What a killed process leaves is removed by the next one, and nothing else."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.owned_directory import owned_directory
from tests.support.system.processes import ROOT, module_environment

# A process that is killed while it has a directory.
KILLED = """
import os, signal, sys
from pathlib import Path
from shared.process.owned_directory import owned_directory
with owned_directory(Path(sys.argv[1]), "own-") as directory:
    (directory / "more").mkdir()
    (directory / "more" / "file").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_directory(parent: Path) -> Path:
    """What a process that was killed leaves in `parent`."""
    subprocess.run([sys.executable, "-c", KILLED, str(parent)], cwd=ROOT, env=module_environment(), check=False)
    (left,) = parent.glob("own-*")
    assert (left / "more" / "file").exists()
    return left


def test_a_directory_is_private_and_is_removed_at_the_end(tmp_path: Path) -> None:
    with owned_directory(tmp_path, "own-") as directory:
        assert (directory.parent, directory.stat().st_mode & 0o777) == (tmp_path, 0o700)
        (directory / "file").touch()
    assert not directory.exists()


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    left = leave_directory(tmp_path)
    with owned_directory(tmp_path, "other-"):
        assert left.exists()
    with owned_directory(tmp_path, "own-") as directory:
        assert list(tmp_path.iterdir()) == [directory]


def test_a_living_processs_directory_is_kept(tmp_path: Path) -> None:
    with owned_directory(tmp_path, "own-") as first, owned_directory(tmp_path, "own-") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])


def test_another_users_directory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leave_directory(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with owned_directory(tmp_path, "own-"):
        assert left.exists()


@pytest.mark.parametrize("name", ["link", "shared", "unknown", "file"])
def test_what_such_a_process_cannot_have_left_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    left = leave_directory(tmp_path / "elsewhere")
    kept = tmp_path / f"own-{name}"
    if name == "link":
        kept.symlink_to(left)
    elif name == "shared":
        left.rename(kept).chmod(0o770)
    elif name == "unknown":
        (left.rename(kept) / "owner.lock").unlink()
    else:
        kept.touch()
    with owned_directory(tmp_path, "own-"):
        assert kept.exists()
        assert name == "file" or (kept / "more" / "file").exists()


def test_without_locks_no_directory_is_taken_for_a_dead_processs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    with monkeypatch.context() as without_locks:
        without_locks.setattr(fcntl, "flock", refuse)
        first = owned_directory(tmp_path, "own-")
        directory = first.__enter__()
    with owned_directory(tmp_path, "own-"):
        assert directory.exists()
    first.__exit__(None, None, None)
    assert not directory.exists()
