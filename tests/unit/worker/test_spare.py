"""What a spare worker's process does before it knows which worker it is."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment, python_command

pytestmark = pytest.mark.process

# Which devices there are is decided by variables that the driver reads once: nothing may ask before there are flags.
ASKED = """
import torch

asked = []
for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))

import services.worker.spare
services.worker.spare.import_all()
print(asked, torch.get_num_threads() > 0)
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=module_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_imports_ask_for_no_device() -> None:
    assert run(python_command("-c", ASKED)).stdout == "[] True\n"


def test_it_says_who_starts_it_to_somebody_else() -> None:
    ended = run(module_command("services.worker.spare"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: only `lockstep serve` and `lockstep ranks` start spare workers\n"
