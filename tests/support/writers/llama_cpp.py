"""llama.cpp's converter and its quantiser, each of a package that pins it; see `tests/writers`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.system.environments import TESTS, environment_of
from tests.support.writers.jobs import run_jobs

_CONVERTER, _LIBRARY = "writers/llama_cpp", "writers/libllama"


def run_converter(jobs: Sequence[tuple[Path, Path, Sequence[str]]]) -> list[str | None]:
    """Convert checkpoints to GGUF files.

    Args:
        jobs: Each checkpoint's directory, the path of its file, and further flags.

    Returns:
        For each, None if its file was written, or else what the converter said.
    """
    [converter] = environment_of(_CONVERTER).glob("sources/*/vendor/llama.cpp")
    return run_jobs(
        _CONVERTER, "convert.py", [(path, model, list(flags)) for model, path, flags in jobs], str(converter)
    )


def call_library(command: str, *arguments: str, text: str = "") -> Any:
    """Call llama.cpp's own library in a process; see `tests/writers/libllama/library.py`."""
    [libraries] = environment_of(_LIBRARY).glob("node_modules/@node-llama-cpp/*/bins/*")
    program = [sys.executable, str(TESTS / _LIBRARY / "library.py"), str(libraries), command, *arguments]
    # It cuts the texts of tokens that it logs between bytes.
    done = subprocess.run(program, input=text, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def published_templates() -> list[Path]:
    """The files of the chat templates that its sources have, as they were published."""
    [directory] = environment_of(_CONVERTER).glob("sources/*/vendor/llama.cpp/models/templates")
    return sorted(directory.glob("*.jinja"))
