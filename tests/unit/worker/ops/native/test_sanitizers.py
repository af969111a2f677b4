"""The kernels read and write only their arguments' memory, and their arithmetic is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.ops.native.isa import available_isas
from tests.support.sanitized_kernels import sanitizer_environment

_TESTS = ("test_products.py", "test_experts.py", "test_draw.py")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not available_isas(), reason="no kernels for this processor")
@pytest.mark.parametrize("name", _TESTS)
def test_sanitizers_find_nothing_in_the_kernels(name: str) -> None:
    command = [sys.executable, "-m", "tests.support.sanitized_kernels", str(Path(__file__).parent / name)]
    result = subprocess.run(
        command, env=os.environ | sanitizer_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
