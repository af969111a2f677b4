"""What this machine can do at most: `machine_rates.c`, compiled for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.support.system.processes import ROOT

_SOURCE = Path(__file__).with_suffix(".c")
_PROGRAM = ROOT / ".cache" / "machine_rates"


class NoCompilerError(Exception):
    """This machine has no C compiler."""


class MachineRates:
    """Measures the rates with the number of threads that the worker uses by default: one per core."""

    def __init__(self) -> None:
        """Compile the program.

        Raises:
            NoCompilerError: There is nothing to compile it with.
        """
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NoCompilerError("this machine has no C compiler")
        _PROGRAM.parent.mkdir(exist_ok=True)
        subprocess.run([compiler, "-O3", "-march=native", "-pthread", _SOURCE, "-o", _PROGRAM], check=True)

    def measure(self, num_bytes: int) -> dict[str, float]:
        """The machine's rates at this moment; takes less than a second.

        Args:
            num_bytes: The size of the buffer that is read: that of the weights, which caches help just as much.

        Returns:
            `read_bytes_per_s`, and `int8_products_per_s`: multiply-adds of 8-bit integers in vectors; and
            `int8_tile_products_per_s` and `bf16_tile_products_per_s` in tiles, 0 where there are none.
        """
        command = [str(_PROGRAM), str(len(os.sched_getaffinity(0))), str(num_bytes)]
        rates: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return {name: rate for name, rate in rates.items() if name != "sink"}
