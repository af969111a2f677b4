"""The flags of `lockstep serve` itself: which can be combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.serve_settings import ServeSettings
from shared.config import load_settings
from tests.support.clients.key_files import key_line, write_keys


def load(*flags: str) -> ServeSettings:
    return load_settings(ServeSettings, ["m", *flags])


def test_the_prompt_is_not_among_the_logged_settings() -> None:
    settings = load("--prompt=a secret")

    assert settings.prompt == "a secret"
    assert "a secret" not in str(settings.model_dump())


def test_the_model_name_is_its_directorys_name_however_the_path_is_written() -> None:
    settings = load_settings(ServeSettings, ["."])
    assert settings.model_name == Path.cwd().name != ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-proposer=model"], "--draft-proposer model and --draft-model must be used together"),
        (
            ["--draft-proposer=ngram", "--draft-model=d"],
            "--draft-proposer model and --draft-model must be used together",
        ),
        (["--workers=a:1", "--tp=1"], "--tp cannot be used with --workers"),
        (["--workers=a:1,b:2", "--dp=3"], "--dp 3 does not match the 2 --workers"),
        (
            ["--workers=a:1", "--draft-proposer=ngram"],
            "--max-model-len, --model-impl, --task, --draft-proposer and --draft-model cannot be used with --workers",
        ),
        (["--listen=unix:x", "--scheduler-listen=unix:x"], "--scheduler-listen is the tokenizer's address"),
        (["--listen=127.0.0.1:0"], "127.0.0.1:0 has no fixed port"),
        (["--insecure-bind=[::]:0"], "[::]:0 has no fixed port"),
        (["--scheduler-listen=localhost:0"], "localhost:0 has no fixed port"),
        (["--workers=nowhere"], "--workers (or LOCKSTEP_SERVE_WORKERS): must be unix:PATH or HOST:PORT"),
        (["--dp=0"], "--dp (or LOCKSTEP_SERVE_DP)"),
        (["--workers=a:1", "--spare-workers=1"], "--spare-workers cannot be used with --workers"),
        (["--tp=2", "--spare-workers=3"], "--spare-workers 3 is more than the 2 workers that could need one"),
        (["--spare-workers=2"], "--spare-workers 2 is more than the 1 worker that could need one"),
        (["--spare-workers=-1"], "--spare-workers (or LOCKSTEP_SERVE_SPARE_WORKERS)"),
        (["--client-keys=/none"], "--client-keys /none: No such file"),
        # Each service has its own address.
        (["--manage-listen=127.0.0.1:9100"], "--manage-listen"),
    ],
)
def test_conflicting_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*flags)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--dp=2"]])
def test_external_workers_determine_the_number_of_replicas(flags: list[str]) -> None:
    settings = load("--workers=10.0.0.1:1,10.0.0.2:2", *flags)

    assert settings.workers == ("10.0.0.1:1", "10.0.0.2:2")
    assert settings.num_replicas == 2


def test_only_replicas_with_expert_parallelism_are_coupled() -> None:
    coupled = [flags for flags in ([], ["--dp=2"], ["--ep"], ["--tp=2", "--ep"]) if load(*flags).is_coupled]

    assert coupled == []
    assert load("--dp=2", "--ep").is_coupled
    assert load("--workers=a:1,b:2", "--ep").is_coupled


def test_the_launcher_has_no_key_for_a_prompt_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flag = f"--client-keys={write_keys(tmp_path / 'keys', key_line('one'))}"
    assert load(flag).keys is not None
    with pytest.raises(SystemExit):
        load(flag, "--prompt=x")
    assert "--prompt cannot be used with --client-keys: use `lockstep generate" in capsys.readouterr().err
