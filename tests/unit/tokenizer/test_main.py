"""The service as a separate process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import module_command, module_environment

pytestmark = pytest.mark.process

ENVIRONMENT = module_environment()


def run_service(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the service to its end."""
    command = module_command("services.tokenizer", *flags)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def running_service(model_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A service that is serving and has no cell; each line of its log is JSON."""
    flags = [f"--model-dir={model_dir}", f"--listen=unix:{tmp_path}/sock", f"--scheduler=unix:{tmp_path}/none"]
    command = module_command("services.tokenizer", *flags, "--log-format=json")
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if json.loads(line)["message"] == "serving":
                break
        yield process
        process.kill()


def test_the_process_does_not_import_torch(model_dir: Path, tmp_path: Path) -> None:
    with running_service(model_dir, tmp_path) as process:
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert ("tokenizers" in mapped, "torch" in mapped) == (True, False)


def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    code = "import sys; sys.modules['torch'] = None; import services.tokenizer.service; print(*sys.modules)"
    command = [*module_command("services.tokenizer")[:1], "-c", code]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    names = {name.partition(".")[0] for name in run.stdout.split()}
    assert ("services" in names, "opentelemetry" in names) == (True, False)


def test_a_failing_template_prevents_the_start(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="{{ messages[5].content }}")
    result = run_service(f"--model-dir={tmp_path}", f"--listen=unix:{tmp_path}/sock")
    assert result.returncode == 1
    assert "the chat template cannot render a plain message" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_missing_file_prevents_the_start(tmp_path: Path, missing: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / missing).unlink()
    result = run_service(f"--model-dir={tmp_path}", f"--listen=unix:{tmp_path}/sock")
    assert result.returncode == 1
    assert missing in result.stderr
    assert "Traceback" not in result.stderr


def test_a_malformed_tokenizer_prevents_the_start(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    result = run_service(f"--model-dir={tmp_path}", f"--listen=unix:{tmp_path}/sock")
    assert result.returncode == 1
    assert "tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("flag", ["--listen", "--http-listen", "--manage-listen"])
def test_a_taken_address_is_named_and_prevents_the_start(model_dir: Path, tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        flags = [f"--model-dir={model_dir}", f"--listen=unix:{tmp_path}/sock"]
        result = run_service(*flags, f"{flag}={address}")
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert f"{address}: Address already in use" in last_line
    assert flag == "--listen" or flag in last_line
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_without_a_cell(model_dir: Path, tmp_path: Path, stop_signal: signal.Signals) -> None:
    with running_service(model_dir, tmp_path) as process:
        process.send_signal(stop_signal)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
