"""With a broken model directory the launcher exits with an error code and one line that says what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.cells.cell import run_serve
from tests.support.system.ports import free_port

WEIGHTS = "model.safetensors"


def test_a_broken_model_is_told_and_ends_everything(tiny_model: Path, tmp_path: Path) -> None:
    """The message for each kind of damage is tested in `test_loader.py`."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = model / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-10])
    result = run_serve(str(model), f"--listen=127.0.0.1:{free_port()}")
    assert result.returncode == 1
    *_, last_line = result.stderr.splitlines()
    assert last_line.startswith("error: the worker exited with code 1: cannot load the model error=")
    assert WEIGHTS in last_line
    assert "Traceback" not in result.stderr
