from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from services.tokenizer.config import TokenizerSettings
from shared.config import load_settings


def load(*flags: str) -> TokenizerSettings:
    return load_settings(TokenizerSettings, flags)


def test_the_model_is_named_after_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "smol"
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert load(f"--model-dir={directory}/").name_of_model == "smol"
    assert load("--model-dir=.").name_of_model == "smol"


def test_a_given_name_takes_precedence() -> None:
    assert load("--model-dir=/models/a", "--model-name=b").name_of_model == "b"


@pytest.mark.parametrize("flag", ["--model-dir", "--model-name", "--served-model-name"])
def test_what_is_no_text_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--model-dir=/models/a", f"{flag}=caf\udce9")
    assert re.fullmatch(rf"error: {flag} \(or LOCKSTEP_TOKENIZER_\w+\): not UTF-8\n", capsys.readouterr().err)


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKENIZER_MODEL_DIR", "/models/a")
    monkeypatch.setenv("LOCKSTEP_TOKENIZER_NUM_ENCODE_THREADS", "3")
    settings = load("--num-encode-threads=1")
    assert (settings.model_dir, settings.num_encode_threads) == (Path("/models/a"), 1)
    assert (settings.listen, settings.scheduler) == ("127.0.0.1:50051", ("127.0.0.1:50054",))


@pytest.mark.parametrize("flags", [["--scheduler=unix:a,unix:b"], ["--scheduler=unix:a", "--scheduler=unix:b"]])
def test_schedulers_are_separated_by_commas_or_given_one_by_one(flags: list[str]) -> None:
    assert load("--model-dir=/models/a", *flags).scheduler == ("unix:a", "unix:b")


def test_the_environment_lists_schedulers_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKENIZER_SCHEDULER", "unix:a,127.0.0.1:5")
    assert load("--model-dir=/models/a").scheduler == ("unix:a", "127.0.0.1:5")


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--num-encode-threads=0", "--num-encode-threads"),
        ("--scheduler-lost-s=-1", "--scheduler-lost-s"),
        ("--scheduler-lost-s=inf", "--scheduler-lost-s"),
        ("--max-unread-s=0", "--max-unread-s"),
        ("--model-name=", "--model-name"),
        ("--scheduler=nowhere", "--scheduler"),
        ("--scheduler=unix:a,nowhere", "--scheduler"),
        ("--scheduler-silence-s=0.5", "--scheduler-silence-s"),
        ("--manage-listen=0.0.0.0", "--manage-listen"),
        ("--listen=0.0.0.0:1", "--listen"),
    ],
)
def test_an_invalid_value_is_refused_by_name(flag: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--model-dir=/models/a", flag)
    assert caught.value.code == 2
    assert name in capsys.readouterr().err


def test_the_model_directory_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load()
    assert "--model-dir" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4317", "https://otel.example.org:443/", "http://[::1]:4317"])
def test_a_collector_is_a_url_with_a_port(endpoint: str) -> None:
    assert load("--model-dir=/models/a", f"--otlp-endpoint={endpoint}").otlp_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:4317",
        "grpc://127.0.0.1:4317",
        "http://collector",
        "http://:4317",
        "http://collector:0",
        "http://collector:70000",
        "http://collector:4317/v1/traces",
        "http://collector:4317?key=1",
        "http://user:password@collector:4317",
    ],
)
def test_what_is_no_url_of_a_collector_is_refused(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--model-dir=/models/a", f"--otlp-endpoint={endpoint}")
    assert "--otlp-endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp"])
def test_a_collector_needs_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if it was not installed.
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit):
        load("--model-dir=/models/a", "--otlp-endpoint=http://127.0.0.1:4317")
    assert "pip install '.[tracing]' in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("parser", ["none", "hermes", "harmony"])
def test_generic_tools_are_read_by_their_own_parser(parser: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--model-dir=/models/a", "--generic-tools", f"--reply-parser={parser}")
    assert f"--generic-tools cannot be used with --reply-parser {parser}" in capsys.readouterr().err
    assert load("--model-dir=/models/a", "--generic-tools", "--reply-parser=generic").generic_tools
