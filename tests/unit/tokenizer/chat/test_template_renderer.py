"""Templates are rendered in processes of their own, and one that costs too much ends only itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.tokenizer.chat.template_renderer import TemplateRenderer
from services.tokenizer.chat.template_rendering import RenderError
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.text_size import MAX_TEXT_BYTES
from shared.errors import RequestTooLargeError
from tests.support.system.processes import ROOT, module_environment, running_children
from tests.support.tokenizer.chat_templates import LocalRenderer
from tests.support.tokenizer.held_loop import least_hold

pytestmark = pytest.mark.process

LOOP = "{{% for _ in range(99999) %}}{}{{% endfor %}}"
# By the content of the first message.
COSTLY = (
    "{% set content = messages[0].content %}"
    "{% if content == 'slow' %}" + LOOP.format(LOOP.format(LOOP.format(""))) + "{% endif %}"
    "{% if content == 'big' %}{% set ns = namespace(a=['x']) %}"
    "{% for _ in range(64) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{% endif %}"
    "{% if content == 'long' %}{{ content * 5 * 2 ** 20 }}{% endif %}"
    "{% if content == 'refused' %}{{ raise_exception('not this') }}{% endif %}"
    "{{ messages | tojson }} {{ bos_token }} {{ number }} {{ tools is none }} {{ add_generation_prompt }}"
)
# Jinja computes the text while it compiles the template.
FOLDED = "{% if messages | length > 9 %}{% set x = 'a' * 3000000000 %}{% endif %}plain"
# As much as any text may be, of what takes longest to be read from JSON.
LINES = "{{ messages[0].content * 4 }}"

PARENT = """
import sys
sys.modules["torch"] = None
from services.tokenizer.chat.template_renderer import TemplateRenderer
renderer = TemplateRenderer({"plain": False}, {}, cpu_s=60.0)
renderer.warm_up(2)
assert renderer.render("plain", {"messages": [], "tools": None}) == "plain"
print("rendered", flush=True)
sys.stdin.readline()
renderer.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def chat(content: str, **variables: float) -> JsonObject:
    return {"messages": [{"role": "user", "content": content}], "tools": None, **variables}


@pytest.fixture(scope="module")
def shared_renderer() -> Iterator[TemplateRenderer]:
    """One for all tests, since its server takes seconds to start."""
    made = TemplateRenderer({COSTLY: False, FOLDED: False, LINES: False}, {"bos_token": "<s>"}, cpu_s=2.0)
    yield made
    made.close()


@pytest.fixture
def renderer(shared_renderer: TemplateRenderer) -> TemplateRenderer:
    """With its counters at 0."""
    shared_renderer.num_ended.update(dict.fromkeys(shared_renderer.num_ended, 0))
    return shared_renderer


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        process.kill()
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def ended(renderer: TemplateRenderer) -> dict[str, int]:
    """Its counters that are not 0."""
    return {cause: number for cause, number in renderer.num_ended.items() if number}


def server_of(pid: int | None = None) -> psutil.Process:
    """The process that forks those that render."""
    servers = [each for each, command in running_children(pid).items() if "render_process" in " ".join(command)]
    # Another module's may not have ended yet.
    return max(servers, key=psutil.Process.create_time)


@pytest.mark.parametrize("content", ["", "a\n b", "é 漢 😀 \x00 \ue000", '{"a": 1}', "x" * (MAX_TEXT_BYTES // 2)])
def test_a_process_renders_what_this_one_would(renderer: TemplateRenderer, content: str) -> None:
    for opens_turn in (True, False):
        fields = chat(content, number=1.7976931348623157e308)
        expected = LocalRenderer({"bos_token": "<s>"}).render(COSTLY, fields, opens_turn=opens_turn)
        assert renderer.render(COSTLY, fields, opens_turn=opens_turn) == expected


@pytest.mark.parametrize(
    ("content", "problem", "causes"),
    [
        ("slow", "the chat template failed: it takes more than 2 s of CPU time", {"cpu": 1}),
        ("big", "the chat template failed: it takes more than 256 MiB of memory", {"memory": 1}),
        ("refused", "the chat template rejected the messages: not this", {}),
    ],
)
def test_what_costs_too_much_or_is_rejected_fails_alone(
    renderer: TemplateRenderer, content: str, problem: str, causes: dict[str, int]
) -> None:
    with pytest.raises(RenderError, match=problem):
        renderer.render(COSTLY, chat(content))
    assert "next" in renderer.render(COSTLY, chat("next"))
    assert ended(renderer) == causes


def test_the_server_of_a_trial_forks_those_that_render_too(renderer: TemplateRenderer) -> None:
    renderer.render(COSTLY, chat("first"))
    server = server_of()
    assert renderer.try_template(COSTLY).takes_tools is False
    renderer.render(COSTLY, chat("second"))
    assert server_of() == server


def test_a_text_that_is_too_long_stays_where_it_was_made(renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestTooLargeError) as caught:
        renderer.render(COSTLY, chat("long"))
    assert int(caught.value.values["actual"]) >= 20 * 2**20


def test_what_is_computed_while_a_template_is_compiled_has_the_same_limits(renderer: TemplateRenderer) -> None:
    assert renderer.render(FOLDED, chat("x")) == "plain"


def test_one_that_was_killed_is_replaced_and_so_is_their_server(renderer: TemplateRenderer) -> None:
    renderer.render(COSTLY, chat("first"))
    kill(server_of().children())
    assert "second" in renderer.render(COSTLY, chat("second"))
    kill([server_of(), *server_of().children()])
    assert "third" in renderer.render(COSTLY, chat("third"))
    assert ended(renderer) == {"lost": 2}


def test_a_stop_signal_for_all_processes_ends_no_chat(renderer: TemplateRenderer) -> None:
    renderer.render(COSTLY, chat("first"))
    server = server_of()
    children = server.children()
    assert children
    for process in (server, *children):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
    assert "second" in renderer.render(COSTLY, chat("second"))
    assert (server_of(), server.children(), ended(renderer)) == (server, children, {})


def test_they_are_forked_by_a_process_with_one_thread_and_no_grpc(renderer: TemplateRenderer) -> None:
    renderer.render(COSTLY, chat("x"))
    server = server_of()
    assert server.num_threads() == 1
    mapped = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    assert [name for name in ("grpc", "uvloop", "torch") if f"/{name}/" in mapped] == []


@pytest.mark.parametrize("cause", ["parent", "server", "renderer"])
def test_they_end_with_their_server_and_that_with_its_parent_or_at_its_wish(cause: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        env=module_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"rendered\n"
        server = server_of(parent.pid)
        children = server.children()
        assert len(children) == 2
        if cause == "renderer":
            parent.stdin.write(b"close\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == b"closed\n"
        else:
            os.kill(parent.pid if cause == "parent" else server.pid, signal.SIGKILL)
        assert psutil.wait_procs(children, timeout=60)[1] == []
        if cause != "server":
            assert psutil.wait_procs([server], timeout=60)[1] == []
        parent.kill()


async def test_a_large_render_does_not_hold_the_interpreter(renderer: TemplateRenderer) -> None:
    content = "a\n" * (MAX_TEXT_BYTES // 2)
    held, rendered = await least_hold(lambda: asyncio.to_thread(renderer.render, LINES, chat(content)))
    assert rendered == content * 4
    assert held <= 1
