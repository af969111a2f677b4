"""Directories that transformers cannot read as they are, or must not."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import NoReturn

import pytest
from tokenizers import Tokenizer

from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.model_files.model_dir import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CONFIG,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelDirectoryError,
    read_tokenizer,
)
from tests.support.models.tiny_tokenizer import IM_END, IM_START, tiny_tokenizer, write_tiny_tokenizer

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
raise RuntimeError
"""


def write_json(path: Path, **fields: object) -> None:
    """Change the fields of a JSON file, which may be missing."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the tiny tokenizer, to be changed."""
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def test_no_code_of_the_directory_is_run(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tokenization_own", "configuration_own", "setup", "__init__"):
        (directory / f"{name}.py").write_text(CODE)
    auto_map = {"AutoTokenizer": ["tokenization_own.Own", None], "AutoConfig": "configuration_own.OwnConfig"}
    write_json(directory / CONFIG, model_type="own", auto_map=auto_map)
    write_json(directory / TOKENIZER_CONFIG, tokenizer_class="Own", auto_map=auto_map)
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(directory)
    assert not (directory / "ran").exists()
    assert tokenizer.backend.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer.special_tokens["bos_token"] == IM_START
    assert ["own tokenizer class is not used" in record.message for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "GPTSw3Tokenizer"},
        {"tokenizer_class": "ByT5Tokenizer"},
        {"tokenizer_class": "BertTokenizer"},
        {"auto_map": ["own.Own", None]},
        {"_commit_hash": "main", "name_or_path": "meta-llama/Llama-2-7b-hf"},
        {"fix_mistral_regex": True},
    ],
)
def test_nothing_is_fetched(directory: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_json(directory / TOKENIZER_CONFIG, **config)
    write_json(directory / CONFIG, _name_or_path="deepseek-ai/deepseek-coder-1.3b-base")
    assert load_tokenizer(directory).special_tokens["bos_token"] == IM_START


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "no-such-model"}, {}])
def test_two_files_are_enough(directory: Path, config: dict[str, object]) -> None:
    (directory / TOKENIZER_CONFIG).unlink()
    (directory / CHAT_TEMPLATE).unlink()
    (directory / CONFIG).write_text(json.dumps(config))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.backend.get_added_tokens_decoder() == tiny_tokenizer().get_added_tokens_decoder()
    assert (tokenizer.special_tokens, tokenizer.templates) == ({}, {})


@pytest.mark.parametrize("name", [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP])
@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token": {"content": "<x>"}},
        {"eos_token": {"content": IM_END, "lstrip": False}},
        {"additional_special_tokens": [{"content": "<x>", "lstrip": True}, "<y>"]},
        {"extra_special_tokens": [{"content": "<x>", "special": True, "normalized": True}]},
    ],
)
def test_a_special_token_may_be_an_object_without_its_type(
    directory: Path, name: str, fields: dict[str, object]
) -> None:
    write_json(directory / name, **fields)
    tokenizer = load_tokenizer(directory)
    # As the worker reads it, which needs no types.
    expected = Tokenizer.from_str(read_tokenizer(directory)).get_added_tokens_decoder()
    assert {i: repr(token) for i, token in tokenizer.backend.get_added_tokens_decoder().items()} == {
        i: repr(token) for i, token in expected.items()
    }
    if "eos_token" not in fields:
        assert "<x>" in {token.content for token in expected.values() if token.special}
    else:
        assert tokenizer.special_tokens["eos_token"] in ("<x>", IM_END)


@pytest.mark.parametrize("name", [TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_file_that_cannot_be_read_is_named(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(ModelDirectoryError, match=name):
        load_tokenizer(directory)


@pytest.mark.parametrize("name", [CHAT_TEMPLATE, "additional_chat_templates/tool_use.jinja"])
def test_a_template_that_cannot_be_read_is_named(directory: Path, name: str) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"\xff")
    with pytest.raises(ModelDirectoryError, match=name):
        load_tokenizer(directory)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("template", [7, [{"name": "default", "template": 7}], [{"template": "x"}], ["x"]])
def test_a_template_that_is_no_text_is_refused(directory: Path, template: object) -> None:
    (directory / CHAT_TEMPLATE).unlink()
    write_json(directory / TOKENIZER_CONFIG, chat_template=template)
    with pytest.raises(ModelDirectoryError, match=TOKENIZER_CONFIG):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    "fields",
    [{"eos_token": {"text": "x"}}, {"eos_token": 7}, {"added_tokens_decoder": [1]}, {"extra_special_tokens": 7}],
)
def test_malformed_tokens_are_refused(directory: Path, fields: dict[str, object]) -> None:
    write_json(directory / TOKENIZER_CONFIG, **fields)
    with pytest.raises(ModelDirectoryError, match=str(directory)):
        load_tokenizer(directory)


def test_the_template_of_a_multimodal_checkpoint_may_be_in_a_file_of_its_processor(directory: Path) -> None:
    write_json(directory / PROCESSOR_TEMPLATE, chat_template="{{ processor }}")
    assert load_tokenizer(directory).templates != {"default": "{{ processor }}"}
    (directory / CHAT_TEMPLATE).unlink()
    assert load_tokenizer(directory).templates == {"default": "{{ processor }}"}
    write_json(directory / PROCESSOR_TEMPLATE, chat_template=5)
    with pytest.raises(ModelDirectoryError, match=rf"^{directory / PROCESSOR_TEMPLATE}: chat_template is not a string"):
        load_tokenizer(directory)
