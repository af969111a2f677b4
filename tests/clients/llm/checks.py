"""What a person types with Simon Willison's `llm`, a program for the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

QUESTION = "Why is the sky blue?"


def run(cell: Any, *args: str) -> str:
    """Run `llm` with the cell's model; returns what it writes to stdout."""
    folder = Path("llm")
    folder.mkdir(exist_ok=True)
    model = {"model_id": "local", "model_name": cell.model, "api_base": cell.base_url, "supports_schema": True}
    # JSON is YAML.
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    variables = os.environ | {"LLM_USER_PATH": str(folder.resolve()), "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).with_name("llm")), "-m", "local", "-o", "max_tokens", "80", *args]
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, env=variables, stdin=nothing, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def check_a_prompt(demo: Any) -> None:
    """A prompt has an answer, with and without a stream."""
    assert run(demo, QUESTION)
    assert run(demo, "--no-stream", QUESTION)


def check_a_schema(demo: Any) -> None:
    """An object has the keys of its schema and no other, though the schema does not close it."""
    person = json.loads(run(demo, "--schema", "name, age int", "Bob is 5"))
    assert isinstance(person.pop("name"), str)
    assert isinstance(person.pop("age"), int)
    assert not person


def check_a_conversation_goes_on(demo: Any) -> None:
    """The program has kept the first prompt and its answer, and sends them with the next."""
    assert run(demo, QUESTION)
    assert run(demo, "--continue", "And red at sunset?")
