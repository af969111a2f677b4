"""The service as a separate process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import module_command, module_environment

pytestmark = pytest.mark.process

ENVIRONMENT = module_environment()

# After everything that rendering and serving import.
CHECK_IMPORTS = """
import sys
from pathlib import Path
import services.tokenizer.__main__
from services.tokenizer.chat.chat_template import load_chat_template
from services.tokenizer.chat.conversation import Conversation, Message
from tests.support.system.processes import ROOT, module_environment
template = load_chat_template(Path(sys.argv[1]), timeout_s=60.0)
template.render(template.fields(Conversation((Message("user", "hello"),))))
print("torch" in sys.modules)
"""


def run_service(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the service to its end."""
    command = module_command("services.tokenizer", *flags)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_process_does_not_import_torch(model_dir: Path) -> None:
    command = [sys.executable, "-c", CHECK_IMPORTS, str(model_dir)]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert result.stdout == "False\n"


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


def test_a_taken_management_address_is_named_and_prevents_the_start(model_dir: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/taken")
        other.listen()
        flags = [f"--model-dir={model_dir}", f"--listen=unix:{tmp_path}/sock"]
        result = run_service(*flags, f"--manage-listen=unix:{tmp_path}/taken")
    assert result.returncode == 1
    assert "--manage-listen" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_without_a_cell(model_dir: Path, tmp_path: Path, stop_signal: signal.Signals) -> None:
    flags = [f"--model-dir={model_dir}", f"--listen=unix:{tmp_path}/sock", f"--scheduler=unix:{tmp_path}/none"]
    command = module_command("services.tokenizer", *flags, "--log-format=json")
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if json.loads(line)["message"] == "serving":
                break
        process.send_signal(stop_signal)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
