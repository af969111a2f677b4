"""What the checks of real clients talk to. Values are JSON, since a check runs in a process of its own.

A check names what it needs by its arguments: each is a fixture here.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.events import MessageAnswer, MessageEvents
from shared.model_files.model_dir import CHAT_TEMPLATE
from tests.support.cells.cell import FLOAT32, REFERENCE, Cell, start_cell
from tests.support.clients.gateway import start_litellm_proxy, start_smg
from tests.support.clients.real_clients import ClientProcess, start_client
from tests.support.models.log_likelihoods import LogLikelihoods
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.models.tool_caller import write_tool_caller
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_environment
from tests.support.tokenizer.embedders import make_base_class, write_embedder_files
from tests.support.tokenizer.messages import any_responses, make_facts
from tests.support.tokenizer.rerankers import add_labels

MODEL, OTHER_NAME = "smollm2", "gpt-4o"

# SmolLM2's own, with tools in Hermes' form.
_TEMPLATE = """\
{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -%}
{%- set others = messages -%}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set others = messages[1:] %}{% endif -%}
{{ '<|im_start|>system\n' ~ system -}}
{%- if tools %}{{ '\n\nYou may call these functions:\n<tools>' -}}
{%- for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor -%}
{{ '\n</tools>\nFor a call, write\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>' }}{% endif -%}
{{ '<|im_end|>\n' -}}
{%- for message in others -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson -}}
{{ '}\n</tool_call>' -}}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""


# The names of tools alone: Claude Code describes its own in 32 KB.
_NAMES_TEMPLATE = """\
{{ '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif -%}
{%- for tool in tools or [] %}{{ '\n' ~ tool.function.name }}{% endfor -%}
{{ '<|im_end|>\n' -}}
{%- for message in messages -%}
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
    with _start_http_cell(tools_model, *FLOAT32) as (_, facts):
        yield facts | {"model_dir": str(tools_model)}


@pytest.fixture(scope="session")
def reference(tools_model: Path) -> Iterator[dict[str, Any]]:
    """The same on `reference`."""
    with _start_http_cell(tools_model, REFERENCE, *FLOAT32) as (_, facts):
        yield facts | {"model_dir": str(tools_model)}


@pytest.fixture(scope="session")
def demo(real_model: Path) -> Iterator[dict[str, Any]]:
    """A cell as `make run` starts it: the real model's own chat template takes no tools."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"--override-generation-config='(.*)'", makefile)
    assert found
    flags = ("--generic-tools", f"--override-generation-config={found[1]}")
    with _start_http_cell(real_model, *flags) as (_, facts):
        yield facts


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A cell of a random model for agents, whose prompts are long: its template shows the names of tools alone."""
    directory = write_tool_caller(tmp_path_factory.mktemp("agents"), num_layers=1, context_length=65_536)
    (directory / CHAT_TEMPLATE).write_text(_NAMES_TEMPLATE, encoding="utf-8")
    with _start_http_cell(directory) as (_, facts):
        yield facts


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A cell of a random model in the shape of Qwen3-Reranker, which is known by its name."""
    model = build_small_model("Qwen3ForCausalLM", "plain")
    directory = write_small_model(model, tmp_path_factory.mktemp("models") / "Qwen3-Reranker-0.6B")
    add_labels(directory)
    with _start_http_cell(directory, REFERENCE) as (_, facts):
        yield facts


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A cell of a random model in the shape of Qwen3-Embedding, which makes vectors of 64 numbers."""
    directory = tmp_path_factory.mktemp("models") / "Qwen3-Embedding-0.6B"
    write_small_model(build_small_model("Qwen3ForCausalLM", "plain"), directory)
    make_base_class(directory)
    write_embedder_files(directory)
    with _start_http_cell(directory, REFERENCE, "--task=embed") as (_, facts):
        yield facts


@pytest.fixture(scope="session")
def message_streams() -> list[tuple[str, Any]]:
    """Streams of Anthropic's Messages with any blocks, each with the whole message."""
    streams = []

    @settings(max_examples=100, database=None, derandomize=True)
    @given(any_responses(), st.booleans())
    def collect(responses: list[tokenizer_pb2.GenerateResponse], hides_reasoning: bool) -> None:
        events = MessageEvents(make_facts(hides_reasoning=hides_reasoning))
        whole = MessageAnswer(make_facts(hides_reasoning=hides_reasoning))
        stream = b"".join(map(events.make, responses)) + events.end()
        for response in responses:
            asyncio.run(whole.write(response))
        streams.append((stream.decode(), whole.value()))

    collect()
    return streams


@pytest.fixture(scope="session")
def gateway(cell: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The gateway `smg` in front of `cell`."""
    with start_smg(cell["url"], tmp_path_factory.mktemp("gateway")) as url:
        yield cell | {"base_url": f"{url}/v1", "url": url}


@pytest.fixture(scope="session")
def litellm_proxy(cell: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """LiteLLM's proxy in front of `cell`, with its `key`; `cell_url` is the cell's own."""
    # The proxy refuses to start with a key that is easily guessed.
    key = f"sk-{secrets.token_hex(16)}"
    folder = tmp_path_factory.mktemp("litellm_proxy")
    with start_litellm_proxy(cell["url"], cell["model"], key, folder) as url:
        yield cell | {"base_url": f"{url}/v1", "url": url, "key": key, "cell_url": cell["url"]}


@pytest.fixture(scope="session")
def _log_likelihoods(float32_model: Path) -> Iterator[LogLikelihoods]:
    num_threads = torch.get_num_threads()
    # Threads that spin while waiting for each other take cores from the cells.
    torch.set_num_threads(1)
    yield LogLikelihoods(float32_model)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def expected_answers(_log_likelihoods: LogLikelihoods) -> list[tuple[str, str, float]]:
    """Contexts, continuations and their log-likelihoods, of the task `local_questions` of the client `lm_eval`."""
    answers = []
    for question in _read_lines("questions.json"):
        context = f"Question: {question['question']}\nAnswer:"
        texts = [f" {answer}" for answer in question["answers"]]
        answers += [(context, text, _log_likelihoods.of_continuation(context, text)) for text in texts]
    return answers


@pytest.fixture(scope="session")
def expected_texts(_log_likelihoods: LogLikelihoods) -> list[tuple[str, float]]:
    """Texts and their log-likelihoods, of the task `local_texts` of the client `lm_eval`."""
    return [(line["text"], _log_likelihoods.of_text(line["text"])) for line in _read_lines("texts.json")]


def _read_lines(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).parent / "lm_eval" / "tasks" / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def _narrow_cell(real_model: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    flags = ("--scheduler.max-num-seqs=1", "--scheduler.max-waiting-requests=1")
    # So that a scheduler that is stopped for a moment counts as lost.
    lost = ("--tokenizer.scheduler-silence-s=1", "--tokenizer.scheduler-lost-s=1")
    with _start_http_cell(real_model, *flags, *lost) as started:
        yield started


@pytest.fixture
def narrow(_narrow_cell: tuple[Cell, dict[str, Any]]) -> dict[str, Any]:
    """A cell that runs one request and lets one wait. Checks leave it idle.

    `scheduler_pid` is its scheduler's, and `abort` the command, run in `root`, that aborts a request by its id.
    """
    running, facts = _narrow_cell
    paths = f"PYTHONPATH={module_environment()['PYTHONPATH']}"
    abort = ["env", paths, sys.executable, "-m", "tests.support.clients.abort_request", running.scheduler_address]
    return facts | {"scheduler_pid": running.find_processes()["scheduler"].pid, "abort": abort, "root": str(ROOT)}


@pytest.fixture
def ending(real_model: Path) -> Iterator[dict[str, Any]]:
    """A cell for one check, which asks it to stop: `launcher_pid` is the process to ask."""
    with _start_http_cell(real_model) as (running, facts):
        yield facts | {"launcher_pid": running.launcher.pid}
        running.wait()


@contextmanager
def _start_http_cell(model_dir: Path, *flags: str) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Start a cell; gives it, and what checks are told of it."""
    address = f"127.0.0.1:{free_port()}"
    names = f"--tokenizer.served-model-name={MODEL},{OTHER_NAME}"
    with start_cell(model_dir, *flags, names, f"--http-listen={address}") as running:
        facts = {"base_url": f"http://{address}/v1", "url": f"http://{address}", "model": MODEL}
        yield running, facts | {"other_name": OTHER_NAME}


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
