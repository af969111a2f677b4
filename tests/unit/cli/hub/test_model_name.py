"""What is the name of a model of a hub, and what is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.hub.model_name import GgufName, ModelName, parse_gguf, parse_model, parse_model_name


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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("acme/tiny:Q4_K_M", GgufName(ModelName("acme/tiny"), None, "Q4_K_M")),
        ("acme/tiny@v1.0:IQ4_XS", GgufName(ModelName("acme/tiny", "v1.0"), None, "IQ4_XS")),
        ("acme/tiny/tiny-Q8_0.gguf", GgufName(ModelName("acme/tiny"), "tiny-Q8_0.gguf", None)),
        ("acme/tiny/Q8_0/a-00001-of-00002.gguf", GgufName(ModelName("acme/tiny"), "Q8_0/a-00001-of-00002.gguf", None)),
    ],
)
def test_a_files_name_is_read_and_written_alike(text: str, name: GgufName) -> None:
    assert parse_gguf(Path(text)) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["tiny.gguf", "acme/tiny.gguf", "/a/b/c.gguf", "../a/b.gguf", "acme/tiny", "a/b:", "a/b:c/d"]
)
def test_what_is_no_files_name_is_none(text: str) -> None:
    assert parse_gguf(Path(text)) is None


@pytest.mark.parametrize("text", ["tiny", "/acme/tiny", "./acme", "../acme/tiny", "a/b/c", "acme/", "acme/x@", "-a/b"])
def test_what_is_no_name_is_none(text: str) -> None:
    assert parse_model_name(text) is None


def test_a_directory_comes_before_a_model_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_model(Path("acme/tiny")) == ModelName("acme/tiny")
    Path("acme/tiny").mkdir(parents=True)
    assert parse_model(Path("acme/tiny")) is None
