"""Directories that are removed with their process: by itself, or after a kill by the next process that makes one.

Each holds a locked file, and the kernel drops the lock with the process: an unlocked one is a dead process's.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_LOCK = "owner.lock"


@contextlib.contextmanager
def owned_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new private directory in `parent`, until the end of the block.

    What dead processes of this user left there, under the same prefix, is removed first.

    Raises:
        OSError: it cannot be made.
    """
    _remove_left(parent, prefix)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as name:
        directory = Path(name)
        with (directory / f"{_LOCK}.new").open("w", encoding="utf-8") as file:
            # Where files cannot be locked the name never appears, and no process removes the directory.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # It appears locked: others never take the directory for a dead process's.
                Path(file.name).rename(directory / _LOCK)
            yield directory


def _remove_left(parent: Path, prefix: str) -> None:
    for lock in parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if _is_own_directory(lock.parent) and _is_unlocked(lock):
                _remove(lock)
                logger.info("removed what a dead process left", extra={"directory": str(lock.parent)})


def _remove(lock: Path) -> None:
    # The lock is last: a child of the dead process may still write, and then another start has to remove the rest.
    for path in lock.parent.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != lock:
            path.unlink()
    shutil.rmtree(lock.parent)


def _is_own_directory(path: Path) -> bool:
    """Whether only this user can write to it. A link to a directory is none."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _is_unlocked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
