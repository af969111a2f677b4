"""What services say of their flags in the process that checks them for `lockstep serve` and `lockstep ranks`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from services.cli.processes.preflight import RefusedError, check_commands
from services.cli.processes.service_command import ROLES, ServiceCommand
from tests.support.models.tiny_llama import write_tiny_llama

_MORE_OF: Mapping[str, Sequence[str]] = {
    "worker": (),
    "scheduler": ("--workers=unix:/nowhere",),
    "tokenizer": ("--scheduler=unix:/nowhere",),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def check(model_dir: Path, more_flags: Mapping[str, Sequence[str]], roles: Sequence[str] = ROLES) -> None:
    commands = []
    for role in roles:
        address = f"unix:{model_dir}/{role}.sock"
        model = () if role == "scheduler" else (f"--model-dir={model_dir}",)
        flags = (f"--listen={address}", *model, *_MORE_OF[role], *more_flags.get(role, ()))
        commands.append(ServiceCommand(role, flags, address, role))
    asyncio.run(check_commands(commands))


def test_flags_of_all_services_are_accepted(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(model_dir, {"worker": ["--ops-backend=reference"], "tokenizer": ["--model-name=ü"]})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("more_flags", "problem"),
    [
        ({"worker": ["--no-such-flag=1"]}, "the worker rejects its settings: unrecognized arguments: --no-such-flag=1"),
        (
            {"worker": ["--tp-size=0"], "scheduler": ["--no-such"], "tokenizer": ["--no-such"]},
            "the worker rejects its settings: --tp-size (or LOCKSTEP_WORKER_TP_SIZE): Input should be greater than",
        ),
        ({"worker": ["--dp-size=2"]}, "the worker rejects its settings: --dp-size needs --dp-rank"),
        (
            {"scheduler": ["--max-num-seqs=many"]},
            "the scheduler rejects its settings: --max-num-seqs (or LOCKSTEP_SCHEDULER_MAX_NUM_SEQS): Input should be",
        ),
        (
            {"scheduler": ["--no-such"], "tokenizer": ["--num-encode-threads=0"]},
            "the scheduler rejects its settings: unrecognized arguments: --no-such",
        ),
        (
            {"tokenizer": ["--num-encode-threads=0"]},
            "the tokenizer rejects its settings: --num-encode-threads (or LOCKSTEP_TOKENIZER_NUM_ENCODE_THREADS): ",
        ),
        (
            {"tokenizer": ["--model-name=\udcff"]},
            "the tokenizer rejects its settings: --model-name (or LOCKSTEP_TOKENIZER_MODEL_NAME): not UTF-8",
        ),
    ],
)
def test_the_first_service_that_rejects_its_flags_is_named_with_its_words(
    model_dir: Path, more_flags: Mapping[str, Sequence[str]], problem: str
) -> None:
    with pytest.raises(RefusedError) as refusal:
        check(model_dir, more_flags)
    assert str(refusal.value).startswith(problem)


def test_a_service_that_is_not_started_is_not_checked(model_dir: Path) -> None:
    check(model_dir, {"worker": ["--no-such-flag=1"]}, roles=("scheduler", "tokenizer"))


def test_a_model_without_weights_is_told_by_the_worker(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path)
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(RefusedError, match=r"^the worker rejects its settings: .*model\.safetensors: no such file"):
        check(model_dir, {})
