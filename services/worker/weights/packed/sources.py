"""Whether a model's files are those that a file of packed weights was made of."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import services
import shared

# Linux, include/uapi/linux/magic.h: ext2 to ext4, XFS, Btrfs, F2FS, tmpfs. A file there has one inode for as long as it
# exists, and a change moves its ctime, which no call sets.
_LOCAL_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
# `struct statfs` has 120 bytes on x86-64 and begins with the type.
_STATFS_BYTES = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Two changes in one tick of the kernel's clock have the same time; a tick has at most 10 ms.
_TICK_NS = 20_000_000
_SECOND_NS = 1_000_000_000
_MAX_THREADS = 8

State = tuple[int, ...]


def file_states(paths: Sequence[Path]) -> list[State]:
    """What moves when one of the files is written or replaced, on a local file system.

    Raises:
        OSError: a file cannot be found.
    """
    return [_state(path.stat()) for path in paths]


def identify_sources(paths: Sequence[Path], num_threads: int) -> list[str]:
    """What only files with the same contents have in common: the states of files, where they are sure to move.

    Where they say little, as on overlay and network file systems, a SHA-256 of the contents, which takes 1 to 2 s for a
    gigabyte and thread.

    Raises:
        OSError: a file cannot be read.
    """
    boot = _boot_id()

    def identify(path: Path) -> str:
        if boot and _is_local(path):
            _outlive_tick(path)
            state = _state(path.stat())
            # Times of whole seconds: the file system may have no finer ones.
            if state[-1] % _SECOND_NS:
                return f"{boot} {' '.join(map(str, state))}"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(num_threads, _MAX_THREADS), "identify-weights") as pool:
        return list(pool.map(identify, paths))


@cache
def code_digest() -> str:
    """A digest of the sources that read, quantise and pack weights: of all that a worker is made of."""
    digest = hashlib.sha256()
    for root in (Path(services.__file__).parent / "worker", Path(shared.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _state(status: os.stat_result) -> State:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _outlive_tick(path: Path) -> None:
    """Wait until a change to the file would get another time than its last one."""
    age_ns = time.time_ns() - path.stat().st_ctime_ns
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / _SECOND_NS)


def _is_local(path: Path) -> bool:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    statfs = getattr(ctypes.CDLL(None), "statfs", None)
    if statfs is None or statfs(os.fsencode(path), buffer):
        return False
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF in _LOCAL_FILE_SYSTEMS


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
