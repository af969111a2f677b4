"""The virtual environment of xgrammar's driver: created once, separate from ours."""

from __future__ import annotations

import subprocess
import sys

from tests.bench.peers.protocol import ROOT

XGRAMMAR_VERSION = "0.2.8"

_DIRECTORY = ROOT / ".cache" / f"xgrammar-{XGRAMMAR_VERSION}"
_REQUIREMENTS = (
    "apache-tvm-ffi==0.1.15.post2",
    "jsonschema==4.26.0",
    "numpy==2.4.6",
    "pydantic==2.14.3",
    "transformers==5.23.0",
)


def xgrammar_python() -> str:
    """The environment's interpreter; the first call creates the environment, which takes minutes and 1 GB."""
    python, made = _DIRECTORY / "bin" / "python", _DIRECTORY / "made"
    if not made.exists():
        print("making an environment with xgrammar", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", _DIRECTORY], check=True)
        # torch at an exact version, so that no other requirement picks a build of it; xgrammar without its
        # dependencies, which are 1 GB of triton that it does not need on a CPU.
        for arguments in (("torch==2.13.0",), _REQUIREMENTS, ("--no-deps", f"xgrammar=={XGRAMMAR_VERSION}")):
            subprocess.run([python, "-m", "pip", "install", "-qq", *arguments], check=True)
        made.touch()
    return str(python)
