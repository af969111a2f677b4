"""What the checks of real clients talk to. Values are JSON, since a check runs in a process of its own.

A check names what it needs by its arguments: each is a fixture here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.model_dir import CHAT_TEMPLATE
from tests.support.cells.cell import FLOAT32, Cell, start_cell
from tests.support.clients.real_clients import ClientProcess, start_client
from tests.support.system.ports import free_port

MODEL = "smollm2"

# SmolLM2's own, with tools in Hermes' form.
_TEMPLATE = """\
{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -%}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif -%}
{{ '<|im_start|>system\n' ~ system -}}
{%- if tools %}{{ '\n\nYou may call these functions:\n<tools>' -}}
{%- for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor -%}
{{ '\n</tools>\nFor a call, write\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>' }}{% endif -%}
{{ '<|im_end|>\n' -}}
{%- for message in messages if message.role != 'system' or not loop.first -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson -}}
{{ '}\n</tool_call>' -}}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""


@pytest.fixture(scope="session")
def tools_model(float32_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the real model with a chat template that takes tools."""
    directory = tmp_path_factory.mktemp("models") / MODEL
    directory.mkdir()
    for file in float32_model.iterdir():
        # The manifest has the digest of the template.
        if file.name not in (CHAT_TEMPLATE, "manifest.json"):
            (directory / file.name).symlink_to(file)
    (directory / CHAT_TEMPLATE).write_text(_TEMPLATE, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def cell(tools_model: Path) -> Iterator[dict[str, Any]]:
    """A cell of the real model. Checks leave it as they found it.

    `base_url` is for OpenAI's libraries, `url` is without `/v1`, and `model_dir` is the model's directory.
    """
    address = f"127.0.0.1:{free_port()}"
    with start_cell(tools_model, *FLOAT32, f"--http-listen={address}") as running:
        yield describe(running, address) | {"model_dir": str(tools_model)}


def describe(cell: Cell, http_address: str) -> dict[str, Any]:
    """What a check is told of a cell."""
    return {"base_url": f"http://{http_address}/v1", "url": f"http://{http_address}", "model": MODEL}


@pytest.fixture(scope="session")
def run_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ClientProcess]]:
    """Gives the process of a client, which is started when first needed, and again after it has ended."""
    with ExitStack() as stack:
        processes: dict[str, ClientProcess] = {}

        def run(name: str) -> ClientProcess:
            if name not in processes or not processes[name].is_running:
                processes[name] = stack.enter_context(start_client(name, tmp_path_factory.mktemp(name)))
            return processes[name]

        yield run
