"""What a person sees of `lockstep serve` in a terminal."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.cells.cell import popen_lockstep
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.terminals import program_in_terminal, read_until, shown_lines

HALF_A_SCREEN = 12


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    """A launcher's TMPDIR, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as path:
        yield Path(path)


def serve_in_terminal(temp_dir: Path, *args: str) -> AbstractContextManager[tuple[int, subprocess.Popen[str]]]:
    """The person's end of a terminal, and `lockstep serve` in it."""
    return program_in_terminal(
        lambda program: popen_lockstep(
            "serve", *args, temp_dir=str(temp_dir), stdin=program, stdout=program, stderr=program
        )
    )


def test_half_a_screen_says_what_serves_where_and_what_to_type_next(tiny_model: Path, temp_dir: Path) -> None:
    address, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = (f"--listen={address}", f"--http-listen={http}", "--worker.ops-backend=reference")
    with serve_in_terminal(temp_dir, str(tiny_model), *flags) as (person, launcher):
        seen = read_until(person, "\"}]}'\r\n")
        with urllib.request.urlopen(f"http://{http}/", timeout=PATIENCE_S) as page:
            assert b"<html" in page.read()
        *_, curl = shown_lines(seen)
        asked = subprocess.run(shlex.split(curl.split(maxsplit=1)[1]), capture_output=True, check=True)
        assert json.loads(asked.stdout)["choices"][0]["message"]["role"] == "assistant"
        with popen_lockstep("generate", "Hello", "--max-tokens=3", "--ignore-eos", temp_dir=str(temp_dir)) as client:
            _, client_stderr = client.communicate(timeout=PATIENCE_S)
        launcher.send_signal(signal.SIGINT)
        seen_later = read_until(person, "stopped; the log is")
        assert launcher.wait(PATIENCE_S) == 0

    lines = shown_lines(seen)
    assert len(lines) <= HALF_A_SCREEN, lines
    log_path = Path(lines[0].removeprefix(f"starting {tiny_model.name}; the log is "))
    ready = {match[1] for line in lines if (match := re.fullmatch(r"  (\w+) +ready after [\d.]+ s", line))}
    assert ready == {"worker", "scheduler", "tokenizer"}
    (serving,) = (line for line in lines if line.startswith("serving"))
    assert re.fullmatch(
        rf"serving {tiny_model.name}: weights float32, computing in float32, reference kernels on \S.*, \d+ threads",
        serving,
    )
    assert f"  gRPC       {address}" in lines
    following, page_line, base, curl = lines[-4:]
    assert following.startswith("  next       `lockstep chat`, `lockstep generate TEXT` or `lockstep top`; Ctrl-C here")
    assert page_line == f"  page       http://{http}/"
    assert base == f"  base URL   http://{http}/v1 with any key; http://{http} for Anthropic's libraries"
    assert curl.startswith(f"  try        curl http://{http}/v1/chat/completions ")
    # Without a flag the client has found this cell.
    assert (client.returncode, client_stderr) == (0, "")
    # The log is whole, private, and only in its file.
    assert " INFO " not in seen + seen_later
    assert log_path.stat().st_mode & 0o777 == 0o600
    log = log_path.read_text(encoding="utf-8")
    assert "INFO serve: started role=worker" in log
    assert "INFO worker: the model is loaded" in log
    assert shown_lines(seen_later)[-2].startswith("stopping; answers in flight may take 30 s")


def test_in_a_terminal_the_log_is_shown_on_demand(temp_dir: Path) -> None:
    with serve_in_terminal(temp_dir, str(temp_dir), "--verbose") as (person, launcher):
        seen = read_until(person, "it has no config.json")
        assert launcher.wait(PATIENCE_S) == 2

    assert " INFO serve: settings model_dir=" in seen
    # Settings at their defaults are not listed.
    assert "=None" not in seen


def test_a_cell_that_cannot_start_leaves_a_line_and_no_log(temp_dir: Path) -> None:
    with serve_in_terminal(temp_dir, str(temp_dir)) as (person, launcher):
        seen = read_until(person, "it has no config.json\r\n")
        assert launcher.wait(PATIENCE_S) == 2

    assert shown_lines(seen) == [f"error: {temp_dir} is not a model directory: it has no config.json"]
    assert list(temp_dir.iterdir()) == []
