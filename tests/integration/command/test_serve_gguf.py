"""`lockstep serve FILE.gguf`: the file is imported once, into the cache."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import run_serve, start_cell
from tests.support.models.gguf_files import write_gguf
from tests.support.system.ports import free_port
from tests.support.system.processes import is_signal_blocked

pytestmark = pytest.mark.process


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "cache" / "hub" / "lockstep-imports"


def test_a_file_is_imported_and_served_and_the_next_time_only_served(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, "llama")
    with start_cell(source, "--worker.ops-backend=reference") as cell, cell.stub() as stub:
        assert stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest()).model == "tiny"
        assert "import: converting the model" in cell.log()
        assert not is_signal_blocked(cell.launcher.pid, signal.SIGINT)
    (directory,) = cache.glob("*/tiny")
    # It is refused after the model was looked up.
    again = run_serve(str(source), f"--listen=127.0.0.1:{free_port()}", "--worker.none=1")
    assert again.returncode == 2
    assert "import:" not in again.stderr
    assert str(directory) in again.stderr


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    missing = run_serve(str(tmp_path / "none.gguf"))
    assert (missing.returncode, missing.stderr) == (2, f"error: {tmp_path / 'none.gguf'}: No such file or directory\n")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    broken = run_serve(str(tmp_path / "broken.gguf"))
    assert broken.returncode == 2
    assert broken.stderr.splitlines()[-1].startswith(
        "error: broken.gguf cannot be read as a GGUF file: it is truncated"
    )
    assert list(cache.glob("**/*")) == []
