"""`lockstep completion`: scripts that complete commands and flags."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from services.cli.commands import COMMANDS
from services.cli.flags import completion
from services.cli.launcher_settings import flags_of_roles
from services.cli.processes.service_command import ROLES
from tests.support.system.patience import PATIENCE_S


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert completion.main([shell]) == 0
    return capsys.readouterr().out


def test_every_command_is_completed() -> None:
    assert completion.commands().keys() == COMMANDS.keys()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_has_the_flags_of_the_launcher_and_of_the_services(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_for(shell, capsys)
    for flag in ("--max-model-len", "--temperature", "--packed-dir", "--without-weights", *flags_of_roles(ROLES)):
        if ".no-" not in flag:
            assert flag.lstrip("-") in script, flag


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["lockstep", "se"], ["serve"]),
        (["lockstep", "serve", "--max-mo"], ["--max-model-len"]),
        (["lockstep", "serve", "--worker.ops"], ["--worker.ops-backend"]),
        (["lockstep", "serve", "--log-format", ""], ["text", "json"]),
        (["lockstep", "top", "--on"], ["--once"]),
        (["lockstep", "completion", ""], list(completion.SHELLS)),
    ],
)
def test_bash_completes(words: list[str], completed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = script_for("bash", capsys)
    ask = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_lockstep"
    program = f'{script}\n{ask}\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    result = subprocess.run(
        ["bash", "--norc"], input=program, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert result.stdout.split() == completed
