"""Reads the model's tokenizer as transformers' `AutoTokenizer` does, which every other server of a model also uses.

Its special tokens and chat templates can be in many files, and its class can replace parts of tokenizer.json.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.tokenizer.text.tokenizer_classes import (
    PLAIN,
    OwnClassError,
    UnknownClassError,
    class_name,
    make_tokenizer,
)
from shared.model_files.model_dir import (
    CHAT_TEMPLATE,
    CONFIG,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelDirectoryError,
    TokenizerFiles,
    read_json_if_any,
    read_tokenizer_files,
)

logger = logging.getLogger(__name__)

_TEMPLATE_SUFFIX = ".jinja"
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer, and what chats need to know of it."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """The texts of special tokens by name, such as `bos_token`; a model can have names of its own."""
    templates: dict[str, str]
    """The sources of the chat templates by name: `default`, if there is any, and others."""
    files: TokenizerFiles
    """What it was read from."""


def load_tokenizer(model_dir: Path, *, chat_template: Path | None = None) -> ModelTokenizer:
    """Read the model's tokenizer. Runs no code of the directory and opens no connection.

    A class that needs such code, or that cannot be loaded, is replaced by the plain one: tokenizer.json as it is.
    transformers is imported only for a class that is not among `tokenizer_classes`.

    Args:
        chat_template: A file with the template to use instead of the model's.

    Raises:
        ModelDirectoryError: a file is malformed, or tokenizer.json is missing.
    """
    files = read_tokenizer_files(model_dir)
    config = read_json_if_any(model_dir, CONFIG)
    templates = _templates(model_dir, files.config)
    if chat_template is not None:
        templates = {_DEFAULT: _read_template(chat_template)}
    try:
        name = class_name(config, files.config, files.text)
        backend, special_tokens = _make(name, files)
    except OwnClassError as error:
        _warn_of_plain(f"{error} is code of the model's own")
        backend, special_tokens = _make(PLAIN, files)
    except UnknownClassError as error:
        loaded = _load_by_transformers(model_dir, str(error))
        backend, special_tokens = _make(PLAIN, files) if loaded is None else loaded
    return ModelTokenizer(backend, special_tokens, templates, files)


def _make(name: str, files: TokenizerFiles) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a class that is known here, and its special tokens."""
    try:
        return make_tokenizer(name, files)
    except UnknownClassError:
        raise
    except Exception as error:
        raise _find_fault(files, error) from error


def _load_by_transformers(model_dir: Path, reason: str) -> tuple[Tokenizer, dict[str, str]] | None:
    """The tokenizer of the model's class, as transformers loads it; None if it cannot."""
    logger.info("transformers reads the tokenizer: importing it makes the start slower", extra={"reason": reason})
    # Imported here because few models need it, and importing it takes seconds.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    try:
        # An absolute path, so that it can never be taken for the name of a model on the Hub.
        path = str(model_dir.resolve())
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the library raises anything
        _warn_of_plain(f"{type(error).__name__}: {error}")
        return None
    if not isinstance(loaded, PreTrainedTokenizerFast):
        _warn_of_plain(f"{type(loaded).__name__} is not based on the library tokenizers")
        return None
    return loaded.backend_tokenizer, loaded.special_tokens_map


def _warn_of_plain(reason: str) -> None:
    logger.warning("the model's own tokenizer class is not used, only tokenizer.json", extra={"reason": reason})


def _templates(model_dir: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The chat templates: those in files of their own, or else in a configuration.

    Source: transformers 5.23, `_from_pretrained` in tokenization_utils_base.py.
    """
    files = {_DEFAULT: model_dir / CHAT_TEMPLATE} if (model_dir / CHAT_TEMPLATE).exists() else {}
    more = sorted((model_dir / MORE_TEMPLATES).glob(f"*{_TEMPLATE_SUFFIX}"))
    files |= {path.name.removesuffix(_TEMPLATE_SUFFIX): path for path in more}
    if files:
        return {name: _read_template(path) for name, path in files.items()}
    name, template = TOKENIZER_CONFIG, tokenizer_config.get("chat_template")
    if template is None:
        name, template = PROCESSOR_TEMPLATE, read_json_if_any(model_dir, PROCESSOR_TEMPLATE).get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and entry.keys() >= {"name", "template"} for entry in template):
            raise ModelDirectoryError(f"{model_dir / name}: chat_template is not a list of named templates")
        template = {str(entry["name"]): entry["template"] for entry in template}
    named = template if isinstance(template, dict) else {} if template is None else {_DEFAULT: template}
    if not all(isinstance(source, str) for source in named.values()):
        raise ModelDirectoryError(f"{model_dir / name}: chat_template is not a string")
    return named


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path}: {error}") from error


def _find_fault(files: TokenizerFiles, fault: Exception) -> ModelDirectoryError:
    """Which file a failure to load came from, as far as that can be found out."""
    try:
        Tokenizer.from_str(files.text)
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        return ModelDirectoryError(f"{files.model_dir / TOKENIZER}: {error}")
    return ModelDirectoryError(f"{files.model_dir}: cannot load the tokenizer: {type(fault).__name__}: {fault}")
