"""Runs tests with kernels that check their memory accesses and arithmetic.

`python -m tests.support.kernels.sanitized_kernels`. The sanitizers' runtime must be loaded first:
`sanitizer_environment` says how.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from services.worker.ops.native import library
from services.worker.ops.native.build import build

_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O0")


def sanitizer_environment() -> dict[str, str]:
    """Variables for a process that runs this module.

    Python's own memory is not freed at exit, nor is the pool of threads: leaks are not reported.
    """
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    return {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


def main(tests: list[str]) -> int:
    """Run `tests`; returns pytest's exit code. A finding ends the process with its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", partial(build, extra_flags=_FLAGS))
        return pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
