"""What is the name of a model of a hub, and what is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.hub.model_name import ModelName, parse_model, parse_model_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("acme/Tiny-Llama_3.1", ModelName("acme/Tiny-Llama_3.1")),
        ("acme/tiny@v1.0", ModelName("acme/tiny", "v1.0")),
        ("acme/tiny@refs/pr/2", ModelName("acme/tiny", "refs/pr/2")),
    ],
)
def test_a_name_is_read_and_written_alike(text: str, name: ModelName) -> None:
    assert parse_model_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize("text", ["tiny", "/acme/tiny", "./acme", "../acme/tiny", "a/b/c", "acme/", "acme/x@", "-a/b"])
def test_what_is_no_name_is_none(text: str) -> None:
    assert parse_model_name(text) is None


def test_a_directory_comes_before_a_model_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_model(Path("acme/tiny")) == ModelName("acme/tiny")
    Path("acme/tiny").mkdir(parents=True)
    assert parse_model(Path("acme/tiny")) is None
