"""An interrupt in the first second, while a command imports its modules, leaves no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment

# Python imports it at its start; it sends the process an interrupt when a module is about to be imported.
INTERRUPTER = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""


def run_interrupted(tmp_path: Path, module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep` with an interrupt at the first import of a module."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER, encoding="utf-8")
    environment = module_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    return subprocess.run(
        module_command("services.cli", *args),
        cwd=ROOT,
        env={**environment, "INTERRUPT_AT": module},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("services.cli.commands", ["top"]),
        ("importlib.metadata", ["--version"]),
        ("grpc", ["chat"]),
        ("pydantic", ["serve", "MODEL"]),
    ],
)
def test_a_command_ends_at_once(tmp_path: Path, module: str, args: list[str]) -> None:
    result = run_interrupted(tmp_path, module, *args)

    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


# The importer is another program, which takes the process over: at its own first import, and when it converts.
@pytest.mark.parametrize("module", ["shared.process.owned_directory", "services.worker.weights.gguf_import.conversion"])
def test_an_import_leaves_nothing(tmp_path: Path, module: str) -> None:
    source, out_dir = tmp_path / "model.gguf", tmp_path / "out" / "model"
    source.write_bytes(b"GGUF")

    result = run_interrupted(tmp_path, module, "import", str(source), str(out_dir))

    assert result.returncode == 128 + signal.SIGINT
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    assert list(tmp_path.glob("out/**/*")) == []


def test_an_import_for_a_cell_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    result = run_interrupted(
        tmp_path, "services.worker.weights.gguf_import.conversion", "serve", str(tmp_path / "model.gguf")
    )

    assert result.returncode == 128 + signal.SIGINT
    assert "Traceback" not in result.stderr
    assert list(tmp_path.glob("cache/**/model*")) == []
