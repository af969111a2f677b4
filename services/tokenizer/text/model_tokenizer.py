"""Reads the model's tokenizer as transformers' `AutoTokenizer` does, which every other server of a model also uses.

Its special tokens and chat templates can be in many files, and its class can replace parts of tokenizer.json.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shared.model_dir import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelDirectoryError,
    read_file,
    read_json_if_any,
)

logger = logging.getLogger(__name__)

# Lists of special tokens, and the names under which transformers takes them.
_LISTS = {"additional_special_tokens": "extra_special_tokens", "extra_special_tokens": "extra_special_tokens"}
# The fields of a named template in tokenizer_config.json.
_ENTRY = {"name", "template"}


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer, and what chats need to know of it."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """The texts of special tokens by name, such as `bos_token`; a model can have names of its own."""
    templates: dict[str, str]
    """The sources of the chat templates by name: `default`, if there is any, and others."""


def load_tokenizer(model_dir: Path) -> ModelTokenizer:
    """Read the model's tokenizer. Runs no code of the directory and opens no connection.

    A class that needs such code, or that cannot be loaded, is replaced by the plain one: tokenizer.json as it is.

    Raises:
        ModelDirectoryError: a file is malformed, or tokenizer.json is missing.
    """
    read_file(model_dir, TOKENIZER)  # its errors say what to do
    loaded = _load(model_dir)
    return ModelTokenizer(
        loaded.backend_tokenizer, loaded.special_tokens_map, _templates(model_dir, loaded.chat_template)
    )


def _load(model_dir: Path) -> Any:
    """The tokenizer of the model's class, or else of the plain one."""
    options = _options(model_dir)
    # Without options there is nothing else to try with the model's class.
    attempts: list[dict[str, Any]] = [{}, options] if options else [{}]
    failures: list[Exception] = []
    for loader, tokens in (*((AutoTokenizer, each) for each in attempts), (PreTrainedTokenizerFast, options)):
        try:
            loaded = _load_with(loader, model_dir, tokens)
        except Exception as error:  # noqa: BLE001 - the library raises anything
            failures.append(error)
            continue
        if loader is not AutoTokenizer:
            reason = f"{type(failures[-1]).__name__}: {failures[-1]}"
            logger.warning("the model's own tokenizer class is not used, only tokenizer.json", extra={"reason": reason})
        return loaded
    raise _find_fault(model_dir, failures[-1]) from failures[-1]


def _load_with(loader: Any, model_dir: Path, options: dict[str, Any]) -> Any:
    # An absolute path, so that it can never be taken for the name of a model on the Hub.
    path = str(model_dir.resolve())
    loaded = loader.from_pretrained(path, trust_remote_code=False, local_files_only=True, **options)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise TypeError(f"{type(loaded).__name__} is not based on the library tokenizers")
    return loaded


def _options(model_dir: Path) -> dict[str, Any]:
    """The special tokens written as objects without their type, which transformers would not recognize."""
    config, special_tokens_map = (
        read_json_if_any(model_dir, TOKENIZER_CONFIG),
        read_json_if_any(model_dir, SPECIAL_TOKENS_MAP),
    )
    names = [*PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES, *_LISTS]
    values = {name: config[name] for name in names if name in config}
    if "added_tokens_decoder" not in config:
        values |= {name: special_tokens_map[name] for name in _LISTS if name in special_tokens_map}
    try:
        typed = {name: _typed(value) for name, value in values.items()}
    except TypeError as error:
        raise ModelDirectoryError(f"{model_dir / TOKENIZER_CONFIG}: a special token is malformed: {error}") from error
    return {_LISTS.get(name, name): value for name, value in typed.items() if value != values[name]}


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if not isinstance(value, dict) or "__type" in value:
        return value
    return _added_token(**value) if "content" in value else {name: _typed(item) for name, item in value.items()}


def _added_token(content: str, *, special: bool = True, **flags: bool) -> AddedToken:
    return AddedToken(content, special=special, **flags)


def _templates(model_dir: Path, template: object) -> dict[str, str]:
    named: dict[str, Any] = {}
    name = TOKENIZER_CONFIG
    if template is None:
        name, template = PROCESSOR_TEMPLATE, read_json_if_any(model_dir, PROCESSOR_TEMPLATE).get("chat_template")
    if template is not None:
        named = template if isinstance(template, dict) else {"default": template}
    if not all(isinstance(source, str) for source in named.values()):
        raise ModelDirectoryError(f"{model_dir / name}: chat_template is not a string")
    return named


def _find_fault(model_dir: Path, fault: Exception) -> ModelDirectoryError:
    """Which file a failure to load came from, as far as that can be found out."""
    named = read_json_if_any(model_dir, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(named, list) and not all(isinstance(entry, dict) and entry.keys() >= _ENTRY for entry in named):
        return ModelDirectoryError(f"{model_dir / TOKENIZER_CONFIG}: chat_template is not a list of named templates")
    read_json_if_any(model_dir, ADDED_TOKENS)
    path = model_dir / TOKENIZER
    try:
        Tokenizer.from_file(str(path))
        for path in (model_dir / CHAT_TEMPLATE, *(model_dir / MORE_TEMPLATES).glob("*.jinja")):
            if path.exists():
                path.read_text(encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        return ModelDirectoryError(f"{path}: {error}")
    return ModelDirectoryError(f"{model_dir}: cannot load the tokenizer: {type(fault).__name__}: {fault}")
