"""Whether a file has been changed or replaced since it was last read."""

from __future__ import annotations

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
