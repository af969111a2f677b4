"""The cells that `lockstep serve` is running on this machine, for commands without an address.

Each launcher locks a file in its private directory; the kernel drops the lock with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# The name prefix of the launchers' private directories.
DIRECTORY_PREFIX = "lockstep-"
_NAME = "cell.json"


@dataclass(frozen=True, slots=True)
class RunningCell:
    """A cell of this user: its model's directory name, its tokenizer's address and its scheduler's for the cell."""

    model: str
    address: str
    cell_address: str


@contextlib.contextmanager
def publish_cell(directory: Path, cell: RunningCell) -> Iterator[None]:
    """Let `find_cells` find the cell inside the `with` block."""
    path = directory / _NAME
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(cell), file)
        file.flush()
        yield


def find_cells() -> list[RunningCell]:
    """This user's running cells, newest first.

    Raises:
        OSError: there is no usable temporary directory, for example because it is full.
    """
    paths = Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*/{_NAME}")
    found = [(started_at, cell) for started_at, cell in map(_read, paths) if cell is not None]
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _read(path: Path) -> tuple[float, RunningCell | None]:
    """None if the file is another user's or its launcher is gone."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        # Other users cannot write into a private directory of this one.
        if path.parent.lstat().st_uid == os.geteuid():
            with path.open(encoding="utf-8") as file:
                if _is_locked(file.fileno()):
                    return os.fstat(file.fileno()).st_mtime, RunningCell(**json.load(file))
    return 0.0, None


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
