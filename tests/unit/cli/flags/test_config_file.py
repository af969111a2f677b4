"""`--config FILE`: a file, the environment above it, and flags above both."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cli import show_config
from services.cli.flags.config_file import load_config_file, read_config_file
from services.cli.processes.preflight import RefusedError
from services.cli.processes.service_command import ROLES
from services.cli.ranks_settings import RanksSettings
from services.cli.serve_arguments import ServeArguments, read_serve_arguments
from services.cli.serve_settings import ServeSettings
from shared.config import load_settings
from tests.support.models.tiny_llama import write_tiny_llama

FILE = """
model-dir: org/name
tp: 2
max_model_len: 8k
workers: []
hf-overrides: {a: 1}
worker:
  ops-backend: native
  packed-cache: false
  num_threads: 3
scheduler:
  enable-mixed-steps: true
  max-num-seqs: 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lockstep.yaml"
    path.write_text(FILE)
    return path


def read(*argv: str) -> ServeArguments:
    return read_serve_arguments(argv)


def test_a_file_has_settings_of_the_launcher_and_of_the_services(path: Path) -> None:
    arguments = read("--config", str(path))
    found = arguments.settings
    assert (str(found.model_dir), found.tp, found.max_model_len) == ("org/name", 2, 8000)
    assert found.config_overrides == {"a": 1}
    assert arguments.service_flags == {
        "worker": ["--ops-backend=native", "--no-packed-cache", "--num-threads=3"],
        "scheduler": ["--enable-mixed-steps=true", "--max-num-seqs=8"],
        "tokenizer": [],
    }


def test_the_environment_overrides_the_file_and_a_flag_both(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SERVE_TP", "3")
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("LOCKSTEP_SERVE_CONFIG", str(path))
    arguments = read("--worker.ops-backend=reference")
    assert arguments.settings.tp == 3
    # The service reads its environment itself.
    assert arguments.service_flags["scheduler"] == ["--enable-mixed-steps=true"]
    assert arguments.service_flags["worker"][-1] == "--ops-backend=reference"
    assert read("other", "--tp=4").settings.tp == 4
    assert str(read("other").settings.model_dir) == "other"


def test_ranks_read_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "ranks.yaml"
    path.write_text("model-dir: m\ntp: 2\nworker: {dtype: float32}\n")
    file = load_config_file([f"--config={path}"], RanksSettings, ["worker"])
    assert file.service_flags == ["--worker.dtype=float32"]
    assert load_settings(RanksSettings, [f"--config={path}"], file_values=file.own).tp == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tpp: 2", r"there is no setting 'tpp'; did you mean tp\?"),
        ("api-key: x", "there is no setting 'api-key'"),
        ("a: [", "while parsing"),
        ("- a", ""),
        ("worker: 1", "worker must have settings below it"),
        ("x: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_what_a_file_may_not_have_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(RefusedError, match=rf"^--config {path}: .*{problem}"):
        read_config_file(path, "serve", ServeSettings.model_fields, ROLES)


def test_a_missing_file_and_a_wrong_value_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--config=/none.yaml")
    assert capsys.readouterr().err == "error: --config /none.yaml: no such file\n"
    (tmp_path / "a.yaml").write_text("model-dir: m\ntp: many\n")
    with pytest.raises(SystemExit):
        read(f"--config={tmp_path / 'a.yaml'}")
    assert "--tp (or LOCKSTEP_SERVE_TP)" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("model-dir: m\nworker: {listen: x}\n")
    with pytest.raises(SystemExit):
        read(f"--config={tmp_path / 'a.yaml'}")
    assert "--worker.listen is set by lockstep serve" in capsys.readouterr().err


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["tp", "worker", "model-dir", "workers", "x", "hf-overrides"]), VALUES))
def test_whatever_a_file_has_it_is_read_or_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    # Nothing else is raised.
    with contextlib.suppress(RefusedError, SystemExit):
        file = read_config_file(path, "serve", ServeSettings.model_fields, ROLES)
        load_settings(ServeSettings, ["m"], file_values=file.own)


@pytest.mark.process
def test_what_config_prints_is_a_file_that_means_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = write_tiny_llama(tmp_path)
    monkeypatch.setenv("LOCKSTEP_API_KEY", "a-secret")
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_MAX_NUM_SEQS", "7")
    flags = [str(model_dir), "--tp=2", "--worker.dtype=float32", "--prompt=a secret", '--hf-overrides={"a": 1}']
    assert show_config.main(flags) == 0
    printed = capsys.readouterr().out
    assert "a-secret" not in printed
    assert "a secret" not in printed
    shown = yaml.safe_load(printed)
    assert (shown["tp"], shown["scheduler"]["max-num-seqs"], shown["worker"]["dtype"]) == (2, 7, "float32")
    assert json.loads(shown["hf-overrides"]) == {"a": 1}
    # Those of every service, and of the launcher, are the launcher's.
    assert not {"listen", "model-dir", "log-level", "tp-size"} & shown["worker"].keys()

    monkeypatch.delenv("LOCKSTEP_SCHEDULER_MAX_NUM_SEQS")
    path = tmp_path / "again.yaml"
    path.write_text(printed)
    assert show_config.main([f"--config={path}"]) == 0
    assert capsys.readouterr().out == printed
