"""Flags of `lockstep serve` that change what a model is, says and lets in: a cell has them in all its processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cells.cell import REFERENCE, Cell, popen_lockstep, start_cell
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port

KEY = "only-one-key-for-all"
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
CONTEXT = 320


@pytest.fixture(scope="module")
def cell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell of two ranks of one group."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = (
        *("--tp=2", REFERENCE, "--http-listen", f"127.0.0.1:{free_port()}"),
        f"--chat-template={folder / 'template.jinja'}",
        f'--hf-overrides={{"max_position_embeddings": {CONTEXT}}}',
        '--override-generation-config={"temperature": 0.0, "max_new_tokens": 3}',
        *("--prompt=Hello", "--api-key", KEY),
    )
    with start_cell(tiny_model, *flags, environment={"XDG_CACHE_HOME": str(folder)}) as running:
        yield running


async def ask(cell: Cell, path: str, body: dict[str, Any] | None = None, key: str | None = KEY) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with cell.http_session() as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, path, json=body, headers=headers) as response:
            return response.status, await response.json()


async def test_every_rank_and_the_tokenizer_have_the_configuration_that_was_given_once(cell: Cell) -> None:
    _, models = await ask(cell, "/v1/models")
    assert models["data"][0]["max_model_len"] == CONTEXT
    message = {"role": "user", "content": "Hi"}
    status, answer = await ask(cell, "/v1/chat/completions", {"messages": [message], "ignore_eos": True})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    again = await ask(cell, "/v1/chat/completions", {"messages": [message], "ignore_eos": True})
    # Greedy, by the default that was replaced.
    assert again[1]["choices"][0]["message"] == answer["choices"][0]["message"]


async def test_the_chat_template_is_the_one_that_was_given(cell: Cell) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    _, rendered = await ask(cell, "/v1/chat/completions/render", body)
    assert rendered["prompts"][0]["prompt"] == "<Hi><Ho>"


async def test_the_key_lets_in_and_nothing_else_does(cell: Cell) -> None:
    assert (await ask(cell, "/v1/models"))[0] == 200
    assert (await ask(cell, "/v1/models", key=None))[0] == 401
    assert (await ask(cell, "/v1/models", key="another"))[0] == 401
    # Its holder is who has started the cell.
    assert (await ask(cell, "/lockstep/state"))[0] == 200


async def test_a_client_finds_the_key_in_its_environment(cell: Cell) -> None:
    command = ("generate", "Hello", "--max-tokens=1", f"--target={cell.address}")
    for environment, code in ({"LOCKSTEP_API_KEY": KEY}, 0), ({}, 1):
        with popen_lockstep(*command, environment=environment) as client:
            _, stderr = await asyncio.to_thread(client.communicate, None, PATIENCE_S)
        assert client.returncode == code, stderr
    assert "needs a key" in stderr
    assert "LOCKSTEP_API_KEY" in stderr


def test_the_key_is_in_no_log_command_line_or_environment_of_a_service(cell: Cell) -> None:
    assert KEY not in cell.log()
    launcher = psutil.Process(cell.launcher.pid)
    assert ["--api-key", "x" * len(KEY)] == launcher.cmdline()[-2:]
    processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 5
    for process in processes:
        assert KEY not in " ".join(process.cmdline())
    for process in processes[1:]:
        assert KEY not in " ".join(process.environ().values())


def test_the_prompt_is_answered_with_the_key(cell: Cell) -> None:
    assert cell.launcher.stdout is not None
    assert any("tokens, ended by" in line for line in cell.launcher.stdout)
    assert "was not answered" not in cell.log()


def test_the_overrides_are_in_the_log_of_settings(cell: Cell) -> None:
    assert json.dumps({"max_position_embeddings": CONTEXT}) in cell.log()
