"""What is read from a model directory, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shared.model_files.model_dir import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelDirectoryError,
    display_name,
    eos_token_ids,
    model_digest,
    read_json,
    read_tokenizer,
)
from tests.support.models.tiny_tokenizer import IM_START, write_tiny_tokenizer


def write_model(model_dir: Path, *, config: object = None, generation: object = None) -> Path:
    (model_dir / "config.json").write_text(json.dumps({} if config is None else config))
    (model_dir / "tokenizer.json").write_text("{}")
    if generation is not None:
        (model_dir / "generation_config.json").write_text(json.dumps(generation))
    return model_dir


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "\xff"])
def test_a_file_without_a_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")

    with pytest.raises(ModelDirectoryError, match=r"config\.json"):
        read_json(tmp_path, "config.json")


def test_a_snapshot_in_the_hubs_cache_has_the_models_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--tiny-llama" / "snapshots" / "0123abc"
    assert display_name(snapshot) == "acme/tiny-llama"
    assert display_name(snapshot.parent) == "snapshots"
    assert display_name(tmp_path / "tiny-llama") == "tiny-llama"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"config\.json"):
        model_digest(tmp_path)


def test_the_digest_depends_on_configuration_and_vocabulary_only(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path)
    digest = model_digest(model_dir)

    (model_dir / "generation_config.json").write_text("{}")
    assert model_digest(model_dir) == digest
    (model_dir / "tokenizer.json").write_text("{} ")
    assert model_digest(model_dir) != digest


def test_bytes_that_move_between_the_files_change_the_digest(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path)
    (model_dir / "config.json").write_text("{} ")
    digest = model_digest(model_dir)

    (model_dir / "config.json").write_text("{}")
    (model_dir / "tokenizer.json").write_text(" {}")

    assert model_digest(model_dir) != digest


def test_the_digest_is_that_of_the_file_while_nothing_adds_tokens(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    digest = model_digest(tmp_path)

    assert read_tokenizer(tmp_path) == (tmp_path / TOKENIZER).read_text(encoding="utf-8")
    for name in (TOKENIZER_CONFIG, CHAT_TEMPLATE):
        (tmp_path / name).unlink()
    assert model_digest(tmp_path) == digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (ADDED_TOKENS, {"<x>": 420}),
        (SPECIAL_TOKENS_MAP, {"bos_token": "<s>"}),
        (TOKENIZER_CONFIG, {"extra_special_tokens": ["<x>"]}),
        (TOKENIZER_CONFIG, {"added_tokens_decoder": {"1": {"content": IM_START, "special": False}}}),
    ],
)
def test_the_digest_depends_on_tokens_in_other_files(tmp_path: Path, name: str, content: object) -> None:
    write_tiny_tokenizer(tmp_path)
    digest = model_digest(tmp_path)

    (tmp_path / name).write_text(json.dumps(content))

    assert model_digest(tmp_path) != digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TOKENIZER, "{"),
        (TOKENIZER_CONFIG, "[]"),
        (TOKENIZER_CONFIG, '{"added_tokens_decoder": [1]}'),
        (TOKENIZER_CONFIG, '{"extra_special_tokens": [7]}'),
        (ADDED_TOKENS, '{"<x>": "a"}'),
        (SPECIAL_TOKENS_MAP, '{"bos_token": {}}'),
    ],
)
def test_tokens_that_cannot_be_read_are_an_error_of_the_directory(tmp_path: Path, name: str, content: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)

    with pytest.raises(ModelDirectoryError, match=re.escape(str(tmp_path))):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 3]}, None, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [7]}, (7,)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"vocab_size": 10}, {"eos_token_id": 9}, (9,)),
        ({}, None, ()),
    ],
)
def test_eos_tokens_of_the_generation_configuration_take_precedence(
    tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(write_model(tmp_path, config=config, generation=generation)) == expected


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"vocab_size": 10}, {"eos_token_id": 10}, r"generation_config\.json: eos_token_id is 10, .* has 10 tokens"),
        ({"vocab_size": 10}, {"eos_token_id": [2, 99]}, r"generation_config\.json: eos_token_id is \[2, 99\]"),
        ({"vocab_size": 10, "eos_token_id": 11}, None, r"/config\.json: eos_token_id is 11, .* has 10 tokens"),
        ({"vocab_size": "10", "eos_token_id": 1}, None, r"config\.json: vocab_size is '10'"),
    ],
)
def test_an_eos_token_outside_the_vocabulary_is_refused_by_name(
    tmp_path: Path, config: object, generation: object, message: str
) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        eos_token_ids(write_model(tmp_path, config=config, generation=generation))


@pytest.mark.parametrize("value", ["2", [2, "3"], -1, 2.5, True])
def test_an_eos_token_that_is_not_an_id_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelDirectoryError, match="eos_token_id"):
        eos_token_ids(write_model(tmp_path, config={"eos_token_id": value}))
