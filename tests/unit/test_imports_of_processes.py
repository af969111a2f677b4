"""What each process imports before it works: most of a start's processor time, which grows by one import in a hurry.

Who raises a number says in the commit what the modules are for.
"""

from __future__ import annotations

import subprocess
from collections.abc import Set

import pytest

from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import module_environment, python_command

pytestmark = pytest.mark.process

# Each takes longer to import than Python to start.
HEAVY = frozenset(
    {
        *("aiohttp", "asyncio", "cryptography", "gguf", "google", "grpc", "httpx", "huggingface_hub", "jinja2"),
        *("kubernetes", "llguidance", "numpy", "opentelemetry", "prometheus_client", "prompt_toolkit", "pydantic"),
        *("safetensors", "tokenizers", "torch", "transformers", "triton"),
    }
)
CLIENT = {"asyncio", "google", "grpc"}
SETTINGS = CLIENT | {"pydantic"}
SERVICE = SETTINGS | {"numpy", "prometheus_client"}

# Code, the most modules, and what of the heavy ones is among them.
PROCESSES: dict[str, tuple[str, int, Set[str]]] = {
    "lockstep --help": ("from services.cli.commands import run; run(['--help'])", 250, {"asyncio"}),
    "lockstep serve": ("import services.cli.serve", 510, SETTINGS),
    "lockstep ranks": ("import services.cli.ranks", 525, SETTINGS | {"prometheus_client"}),
    "lockstep generate": ("import services.cli.clients.generate", 315, CLIENT),
    "lockstep rerank": ("import services.cli.clients.rerank", 315, CLIENT),
    "lockstep embed": ("import services.cli.clients.embed", 315, CLIENT),
    "lockstep chat": ("import services.cli.clients.chat", 350, CLIENT),
    "lockstep top": ("import services.cli.clients.top", 320, CLIENT),
    "lockstep pull": ("import services.cli.hub.pull", 170, set()),
    "checks of flags": (
        "import services.worker.config, services.scheduler.config, services.tokenizer.config",
        540,
        SETTINGS | {"numpy"},
    ),
    "scheduler": ("import services.scheduler.__main__", 715, SERVICE),
    "watch of endpoints": (
        "import services.scheduler.discovery.slice_watch",
        695,
        {"google", "kubernetes", "numpy", "pydantic"},
    ),
    "tokenizer": ("import services.tokenizer.service", 805, SERVICE | {"jinja2", "llguidance", "tokenizers"}),
    "tokenizer with HTTP": (
        "import services.tokenizer.service, services.tokenizer.http.routes, services.tokenizer.http.connections.server",
        980,
        SERVICE | {"aiohttp", "jinja2", "llguidance", "tokenizers"},
    ),
    "renders of chats": (
        "from services.tokenizer.chat.render_child import warm_up; warm_up(); "
        "import services.tokenizer.chat.render_process",
        190,
        {"jinja2"},
    ),
    "readers of bodies": (
        "import services.tokenizer.http.reading.read_process",
        475,
        {"google", "llguidance", "numpy", "pydantic"},
    ),
    "trials of grammars": ("import services.tokenizer.grammar.grammar_trial", 305, {"llguidance", "numpy"}),
    "worker on the CPU": (
        "import services.worker.__main__, services.worker.runner.model_runner as _; "
        "from services.worker.ops import load_ops; load_ops('cpu'); load_ops('reference')",
        1655,
        SERVICE | {"safetensors", "torch"},
    ),
    "spare worker": (
        "import services.worker.spare; services.worker.spare.import_all()",
        1660,
        SERVICE | {"safetensors", "torch"},
    ),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_what_it_needs(process: str) -> None:
    code, most, heavy = PROCESSES[process]
    command = python_command("-c", f"{code}\nimport sys; print('\\n', *sys.modules)")
    run = subprocess.run(
        command, env=module_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    names = run.stdout.splitlines()[-1].split()
    assert {name for name in names if name in HEAVY} == heavy
    assert 0.9 * most < len(names) <= most
