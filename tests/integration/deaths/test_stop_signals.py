"""Helpers outlive the stop signals that a service manager sends to all processes, from their first instruction on."""

from __future__ import annotations

import ast
import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.v1 import tokenizer_pb2
from services.cli.processes.preflight import check_commands
from services.cli.processes.service_command import ServiceCommand
from services.scheduler.discovery.kubernetes_discovery import KubernetesDiscovery
from services.scheduler.discovery.last_seen import LastSeen
from services.tokenizer.chat.template_renderer import TemplateRenderer
from services.tokenizer.grammar.grammar_child import TrialLimits
from services.tokenizer.grammar.structured_output import FormCompiler
from services.worker.ops.native import build
from shared.process.parent import leave_end_to_parent
from tests.support.kubernetes.endpoint_slices import SLICES, endpoint, make_slice, write_service_account
from tests.support.kubernetes.kube_api import run_kube_api
from tests.support.kubernetes.watched_slices import watch_task
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ROOT = Path(__file__).parents[3]
# What starts processes, and is no helper of one: services, which are to end when they are asked, and `--help`.
NO_HELPERS = {"services/cli/processes/child_process.py", "services/cli/serve.py", "services/cli/ranks.py"}
STARTERS = {"Popen", "run", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "spawn_process"}


@pytest.fixture
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Each process that is started gets all stop signals before it has done anything."""
    asked: list[int] = []

    class AskedPopen(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for number in STOP_SIGNALS:
                self.send_signal(number)
            asked.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", AskedPopen)
    yield asked
    assert asked


async def test_a_grammar_is_tried_by_a_process_that_was_asked_to_end_in_its_imports(
    tiny_model: Path, asked_at_once: list[int]
) -> None:
    compiler = FormCompiler(tiny_model, TrialLimits(cpu_s=60.0, memory_bytes=2**30))
    try:
        await compiler.compile(tokenizer_pb2.StructuredOutput(grammar='start: "yes" | "no"'))
        assert len(asked_at_once) == 1
    finally:
        compiler.close()


@pytest.mark.usefixtures("asked_at_once")
def test_a_chat_is_rendered_by_a_process_that_was_asked_to_end_in_its_imports() -> None:
    renderer = TemplateRenderer({"plain": False}, {}, cpu_s=60.0)
    try:
        assert renderer.render("plain", {"messages": [], "tools": None}) == "plain"
        assert not any(renderer.num_ended.values())
    finally:
        renderer.close()


async def test_endpoints_are_watched_by_a_process_that_was_asked_to_end_in_its_imports(
    tmp_path: Path, asked_at_once: list[int]
) -> None:
    found = asyncio.Event()
    with run_kube_api(free_port()) as api:
        api.store.create(SLICES, make_slice("one", [endpoint("10.0.0.1")]))
        discovery = KubernetesDiscovery(watch_task(api.url, write_service_account(tmp_path)), LastSeen(0.0))
        watching = asyncio.create_task(discovery.run(lambda _: found.set()))
        async with asyncio.timeout(PATIENCE_S):
            await found.wait()
        watching.cancel()
        await asyncio.wait([watching])
    assert len(asked_at_once) == 1


@pytest.mark.usefixtures("asked_at_once")
async def test_settings_are_checked_by_processes_that_were_asked_to_end_in_their_imports(tiny_model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--model-dir={tiny_model}", f"--scheduler=127.0.0.1:{free_port()}", f"--listen={address}")
    await check_commands([ServiceCommand("tokenizer", flags, address, "tokenizer")])


@pytest.mark.usefixtures("asked_at_once")
def test_the_compiler_of_kernels_outlives_a_stop_signal() -> None:
    text = "import time; time.sleep(0.1); print('compiled')"
    assert build._run([sys.executable, "-c", text]) == "compiled\n"


def test_signals_are_blocked_only_while_a_helper_is_started() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(FileNotFoundError), leave_end_to_parent():
        subprocess.Popen(["/nowhere"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_every_helper_is_started_with_its_end_left_to_its_parent() -> None:
    started = {
        str(path.relative_to(ROOT)): list(_find_starts(ast.parse(path.read_text(encoding="utf-8"))))
        for folder in ("services", "shared")
        for path in (ROOT / folder).rglob("*.py")
    }
    started = {path: starts for path, starts in started.items() if starts}
    assert started.keys() >= NO_HELPERS
    exposed = {path for path, starts in started.items() if not all(starts)}
    assert exposed == NO_HELPERS


def _find_starts(node: ast.AST, *, is_left: bool = False) -> Iterator[bool]:
    """For each call in a module that starts a process: whether it is in a block of `leave_end_to_parent`."""
    if isinstance(node, ast.With):
        is_left = is_left or any("leave_end_to_parent" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in STARTERS:
        name = ast.unparse(node.func)
        if name.startswith(("subprocess.", "asyncio.create_subprocess", "os.")):
            yield is_left
    for child in ast.iter_child_nodes(node):
        yield from _find_starts(child, is_left=is_left)
