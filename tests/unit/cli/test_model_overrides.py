"""A model's directory with other values in its configuration."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from services.cli.model_overrides import override_model
from services.cli.processes.preflight import RefusedError
from services.cli.serve_settings import GENERATION_KEYS, ServeSettings
from services.worker.weights.sampling_defaults import SamplingDefaults
from shared.config import load_settings
from shared.model_files.model_dir import display_name, model_digest

CONFIG = {"a": 1, "text_config": {"b": 2, "c": 3}, "rope_scaling": {"x": 1, "y": 2}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def read(directory: Path, name: str) -> object:
    return json.loads((directory / name).read_text())


def test_without_overrides_the_directory_is_the_models_own(model_dir: Path) -> None:
    assert override_model(model_dir, {}, {}) == model_dir


def test_values_are_replaced_and_those_of_a_part_one_by_one(model_dir: Path) -> None:
    changed = override_model(model_dir, {"a": 5, "text_config": {"b": 7}, "rope_scaling": {"x": 9}, "new": None}, {})
    assert read(changed, "config.json") == {
        **CONFIG,
        "a": 5,
        "text_config": {"b": 7, "c": 3},
        "rope_scaling": {"x": 9},
        "new": None,
    }
    assert read(model_dir, "config.json") == CONFIG
    assert (changed / "model.safetensors").read_bytes() == b"weights"
    assert (changed / "model.safetensors").stat() == (model_dir / "model.safetensors").stat()
    assert display_name(changed) == display_name(model_dir)
    assert model_digest(changed) != model_digest(model_dir)


def test_the_generation_configuration_may_be_new_and_is_no_part_of_the_digest(model_dir: Path) -> None:
    changed = override_model(model_dir, {}, {"temperature": 0.5})
    assert read(changed, "generation_config.json") == {"temperature": 0.5}
    assert model_digest(changed) == model_digest(model_dir)


def test_the_same_overrides_have_the_same_files_and_a_changed_model_has_others(model_dir: Path) -> None:
    first = override_model(model_dir, {"a": 5}, {})
    state = (first / "config.json").stat()
    assert override_model(model_dir, {"a": 5}, {}) == first
    assert (first / "config.json").stat() == state
    (model_dir / "config.json").write_text(json.dumps({**CONFIG, "b": 0}))
    later = override_model(model_dir, {"a": 5}, {})
    assert later != first
    assert read(later, "config.json") == {**CONFIG, "a": 5, "b": 0}


def test_a_snapshot_of_a_hub_keeps_its_name(tmp_path: Path, model_dir: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    model_dir.rename(snapshot)
    assert display_name(override_model(snapshot, {"a": 2}, {})) == "org/name"


def test_a_model_that_cannot_be_read_and_a_cache_that_cannot_be_written_are_told(model_dir: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(RefusedError, match="the model's changed configuration cannot be kept: "):
        override_model(model_dir, {"a": 2}, {})
    (model_dir / "config.json").write_text("[")
    with pytest.raises(RefusedError, match=r"config\.json: "):
        override_model(model_dir, {"a": 2}, {})


def test_the_defaults_that_can_be_replaced_are_those_that_workers_read() -> None:
    read_by_workers = {field.name for field in fields(SamplingDefaults)} - {"max_tokens"}
    assert read_by_workers | {"max_new_tokens", "eos_token_id"} == GENERATION_KEYS


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--hf-overrides=[1]", "--hf-overrides (or LOCKSTEP_SERVE_HF_OVERRIDES): must be a JSON object"),
        ("--hf-overrides={", "--hf-overrides (or LOCKSTEP_SERVE_HF_OVERRIDES): not JSON"),
        ("--override-generation-config={'a'}", "not JSON"),
        ('--override-generation-config={"temprature": 1}', "--override-generation-config: 'temprature' is not read"),
        ("--chat-template=/none", "--chat-template (or LOCKSTEP_SERVE_CHAT_TEMPLATE): Path does not point to a file"),
        ("--api-key=", "--api-key (or LOCKSTEP_API_KEY): must be a key of 1 to 512 visible ASCII characters"),
        ("--api-key=a b", "must be a key of 1 to 512 visible ASCII characters"),
    ],
)
def test_what_cannot_be_meant_is_refused(flag: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(ServeSettings, ["m", flag])
    said = capsys.readouterr().err
    assert message in said
    assert "a b" not in said
