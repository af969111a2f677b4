"""What `--help` prints about settings."""

from __future__ import annotations

import re

import pytest
from pydantic_settings import BaseSettings

from services.cli.serve_settings import ServeSettings
from services.scheduler.config import SchedulerSettings
from services.tokenizer.config import TokenizerSettings
from services.worker.config import WorkerSettings
from shared.config import load_settings

# Text that a user would never type.
PYTHON = re.compile(r"\b(str|int|float|bool|tuple|None|Path|True|False|Annotated|Literal)\b|\(\)")


def help_of(settings_type: type[BaseSettings], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        load_settings(settings_type, ["--help"])
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("settings_type", [ServeSettings, SchedulerSettings, TokenizerSettings, WorkerSettings])
def test_help_contains_no_python_terms(settings_type: type[BaseSettings], capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(settings_type, capsys)

    assert text.startswith(f"usage: {settings_type.model_config['cli_prog_name']} ")
    assert PYTHON.findall(text) == []


def test_help_shows_what_a_flag_takes_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(ServeSettings, capsys)

    assert "--tp N Workers" in text
    assert "--health-kill-s SECONDS Kill and restart" in text
    assert (
        "--insecure-bind ADDRESS Serve unencrypted on this address instead of --listen; any host that can reach it may "
        "connect. --" in text
    )
    assert "--workers ADDRESS,... Use" in text
    assert "--draft-model PATH " in text
    assert "--draft-proposer {none,ngram,mtp,model} How" in text
    assert "Serve gRPC reflection. (default: off)" in text
    assert "(default: 127.0.0.1:50051)" in text
    assert "arguments: MODEL_DIR Model directory" in text


def test_a_list_of_names_is_none_of_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(TokenizerSettings, capsys)

    for flag in ("served-model-name", "http-allowed-hosts", "cors-origin"):
        assert f"--{flag} NAME,... " in text
    assert "--scheduler ADDRESS,... " in text


@pytest.mark.parametrize(("settings_type", "flags"), [(SchedulerSettings, []), (WorkerSettings, ["--model-dir=/m"])])
def test_a_setting_for_tests_is_read_and_not_shown(
    settings_type: type[BaseSettings], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "fail-on-token" not in help_of(settings_type, capsys)
    assert load_settings(settings_type, [*flags, "--fail-on-token=7"]).model_dump()["fail_on_token"] == 7
    with pytest.raises(SystemExit):
        load_settings(settings_type, [*flags, "--fail-on-token=-1"])


def test_a_required_flag_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "in the Hugging Face layout. (required)" in help_of(TokenizerSettings, capsys)
