"""Files that are read again while a service runs: whether they have changed, and what they contain."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

FileState = tuple[int, int, int] | None
"""The inode, time of modification and size of a file, by way of symlinks; None if there is no such file."""


def file_state(path: Path) -> FileState:
    """The file's state at present; another one means that it has to be read again."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_regular_file(path: Path) -> bytes:
    """What a file contains, by way of symlinks.

    A pipe or a device in its place is refused: reading it could block the event loop, or never end.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()
