"""A model directory in Hugging Face's layout, read as data only: none of its code is run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"


class ModelDirectoryError(Exception):
    """The directory is not a usable model; the message names the file."""


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ModelDirectoryError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads((model_dir / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{model_dir / name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{model_dir / name}: not a JSON object")
    return value


def model_digest(model_dir: Path) -> str:
    """What a model's services must agree on: SHA-256 over configuration and vocabulary, in hex.

    Raises:
        ModelDirectoryError: a file is missing.
    """
    digest = hashlib.sha256()
    for name in (CONFIG, TOKENIZER):
        try:
            data = (model_dir / name).read_bytes()
        except OSError as error:
            raise ModelDirectoryError(f"{model_dir / name}: {error}") from error
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def vocabulary_size(model_dir: Path) -> int | None:
    """The configured vocabulary size; None if there is none.

    Raises:
        ModelDirectoryError: the file is malformed.
    """
    size = read_json(model_dir, CONFIG).get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise ModelDirectoryError(f"{model_dir / CONFIG}: vocab_size is {size!r}, not a positive integer")
    return size


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence tokens, from the generation or else the model configuration; may be empty.

    Raises:
        ModelDirectoryError: a file is malformed, or a token is not in the vocabulary.
    """
    name, value = GENERATION_CONFIG, None
    if (model_dir / GENERATION_CONFIG).exists():
        value = read_json(model_dir, GENERATION_CONFIG).get("eos_token_id")
    if value is None:
        name, value = CONFIG, read_json(model_dir, CONFIG).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelDirectoryError(f"{model_dir / name}: eos_token_id is {value!r}, not a token id or a list of them")
    size = vocabulary_size(model_dir)
    if size is not None and ids and max(ids) >= size:
        raise ModelDirectoryError(
            f"{model_dir / name}: eos_token_id is {value!r}, but the vocabulary in {CONFIG} has {size} tokens, so ids "
            f"must be below that"
        )
    return tuple(ids)
