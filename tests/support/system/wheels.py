"""Wheels of the services' distribution: of this checkout, and of the releases that it must work with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tests.support.system.processes import ROOT

# The commit that changed this file last begins the releases that must work with this checkout, and give its answers.
_FIRST_RELEASE = ROOT / "tests" / "support" / "system" / "first_release.txt"
HIGHER_RELEASE = "1000.0.0"

_CACHE = ROOT / ".cache" / "wheels"
_VERSION = re.compile(r'^version = ".*"$', re.MULTILINE)


def copy_source(folder: Path) -> Path:
    """Copy what the wheels are made of, without what is generated; returns `folder`."""
    ignored = shutil.ignore_patterns("__pycache__", "*_pb2*.py*", "prebuilt", "build", "*.egg-info")
    for name in ("protos", "services", "shared"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(project: Path, folder: Path) -> Path:
    """Build a project's wheel as `pip install` does."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(project)]
    subprocess.run(pip, check=True)
    (built,) = folder.iterdir()
    return built


def first_commit() -> str:
    """The first commit whose release must work with this checkout; empty outside of a clone, later in a shallow one."""
    command = ["git", "log", "-1", "--format=%H", "--", str(_FIRST_RELEASE)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True).stdout.strip()


def unpack_commit(commit: str, folder: Path) -> Path:
    """Unpack a commit's wheel, which is made once and kept; returns `folder`."""
    if not (_CACHE / commit).exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
            source, made = Path(temporary) / "source", Path(temporary) / "made"
            source.mkdir()
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
            build(source, made)
            made.rename(_CACHE / commit)
    (wheel,) = (_CACHE / commit).iterdir()
    return _unpack(wheel, folder)


def unpack_higher_release(folder: Path) -> Path:
    """Build this checkout's wheel as `HIGHER_RELEASE`, and unpack it; returns `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        source = copy_source(Path(temporary) / "source")
        project = source / "pyproject.toml"
        text, num_versions = _VERSION.subn(f'version = "{HIGHER_RELEASE}"', project.read_text())
        assert num_versions == 1
        project.write_text(text)
        return _unpack(build(source, Path(temporary) / "made"), folder)


def _unpack(wheel: Path, folder: Path) -> Path:
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
