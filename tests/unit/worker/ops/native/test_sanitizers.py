"""The kernels read and write only their arguments' memory, whatever is in a file, and their arithmetic is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.ops.native.isa import available_isas
from tests.support.kernels.sanitized_kernels import sanitizer_environment

_HERE = Path(__file__).parent
# Those that read weights, and all others.
_PRODUCTS = ("test_products.py", "test_experts.py", "test_draw.py")
_OTHERS = ("test_attention.py", "test_heads.py", "test_elementwise.py", "test_recurrent.py", "test_capture.py")
_HOSTILE = ("test_hostile_weights.py",)


@pytest.mark.process
@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(_PRODUCTS, marks=pytest.mark.proof),
        pytest.param(_OTHERS, marks=pytest.mark.proof),
        # Thousands of files for each set of instructions.
        pytest.param(_HOSTILE, marks=(pytest.mark.proof, pytest.mark.timeout(3600))),
    ],
)
def test_sanitizers_find_nothing_in_the_kernels(names: tuple[str, ...]) -> None:
    # In one process: each would compile the kernels if they began together.
    command = [sys.executable, "-m", "tests.support.kernels.sanitized_kernels", *(str(_HERE / name) for name in names)]
    result = subprocess.run(
        command, env=os.environ | sanitizer_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
