"""The files in which sentence-transformers says what it computes before and after a model.

Source: sentence-transformers 6.2, `BaseModel` in base/model.py, and the modules in sentence_transformer/modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.model_files.model_dir import (
    CONFIG,
    SENTENCE_CONFIG,
    SENTENCE_MODEL_CONFIG,
    SENTENCE_MODULES,
    ModelDirectoryError,
    read_file,
    read_json,
    read_json_if_any,
)

_POOLINGS: Mapping[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}
# Older files have a flag for each mode.
_FLAG_TO_MODE = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SENTENCE = "sentence_embedding"
# The names of the prompts that a document may have; the first one counts. Source: `encode_document`.
_DOCUMENTS = ("document", "passage", "corpus")
# Prompts that every model has, as they are unless its files say otherwise.
_PROMPTS = {"query": "", "document": ""}


@dataclass(frozen=True, slots=True)
class VectorRecipe:
    """How a model makes vectors of texts."""

    pooling: Literal["last", "mean"]
    """Whose hidden state is the vector: the last token's, or the mean of all."""
    is_normalized: bool
    """Whether vectors have length 1."""
    prompts: Mapping[str, str]
    """What may be put before a text, by name."""
    default_prompt: str
    """What is put before a text if the request does not say."""
    document_prompt: str
    """What is put before a document."""
    max_tokens: int | None = None
    """The most tokens that the publisher gives to the model; None means that the files do not say."""

    @property
    def query_prompt(self) -> str:
        """What is put before a query."""
        return self.prompts["query"]


def read_vector_recipe(model_dir: Path) -> VectorRecipe:
    """The recipe in a directory's files. Nothing is guessed.

    Raises:
        ModelDirectoryError: a file is missing or malformed, or something of the recipe is not computed here.
    """
    modules = read_modules(model_dir)
    if not modules:
        raise ModelDirectoryError(
            f"{model_dir} has no {SENTENCE_MODULES}, so that nothing says how its hidden states become vectors; "
            "sentence-transformers writes it, with the files that it names, and publishers of embedders have them"
        )
    kinds = [module_kind(module) for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelDirectoryError(
            f"{model_dir / SENTENCE_MODULES}: the modules are {', '.join(kinds)}, of which vectors are not made here; "
            "known are Transformer, Pooling and perhaps Normalize, in this order"
        )
    if len(modules) > 2:
        _check_normalize(model_dir, modules[2])
    named, default_name = _read_prompts(model_dir)
    prompts = _PROMPTS | named
    return VectorRecipe(
        _read_pooling(model_dir, modules[1]),
        len(modules) > 2,
        prompts,
        "" if default_name is None else prompts[default_name],
        next((named[name] for name in _DOCUMENTS if name in named), ""),
        _read_max_tokens(model_dir),
    )


def read_modules(model_dir: Path) -> list[dict[str, Any]]:
    """What modules.json lists; nothing if it is missing.

    Raises:
        ModelDirectoryError: it is malformed.
    """
    if not (model_dir / SENTENCE_MODULES).exists():
        return []
    try:
        modules = json.loads(read_file(model_dir, SENTENCE_MODULES).decode())
    except (RecursionError, ValueError) as error:
        raise ModelDirectoryError(f"{model_dir / SENTENCE_MODULES}: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelDirectoryError(f"{model_dir / SENTENCE_MODULES}: not a list of modules")
    return modules


def module_kind(module: Mapping[str, Any]) -> str:
    """The name of a module's class."""
    return str(module.get("type")).rpartition(".")[2]


def module_directory(model_dir: Path, module: Mapping[str, Any]) -> Path:
    """Where a module has its files.

    Raises:
        ModelDirectoryError: that is not a folder of the directory.
    """
    path = module.get("path")
    # Untrusted: it must not point outside the directory.
    if not isinstance(path, str) or not path or path == ".." or Path(path).name != path:
        kind = module_kind(module)
        raise ModelDirectoryError(f"{model_dir / SENTENCE_MODULES}: the path of {kind} is {path!r}")
    return model_dir / path


def _read_pooling(model_dir: Path, module: Mapping[str, Any]) -> Literal["last", "mean"]:
    directory = module_directory(model_dir, module)
    config, path = read_json(directory, CONFIG), directory / CONFIG
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAG_TO_MODE.items() if config.get(flag)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if config.get("include_prompt", True) is not True:
        raise ModelDirectoryError(f"{path}: include_prompt is not true, and a mean without its prompt is not computed")
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        names = " and ".join(map(str, modes))
        raise ModelDirectoryError(f"{path}: the pooling {names} is not computed; known are {', '.join(_POOLINGS)}")
    return _POOLINGS[modes[0]]


def _check_normalize(model_dir: Path, module: Mapping[str, Any]) -> None:
    directory = model_dir / module["path"] if module.get("path") else None
    if directory is None or not directory.exists():
        # Published without a file, and hubs have no empty folders.
        return
    directory = module_directory(model_dir, module)
    config = read_json_if_any(directory, CONFIG)
    if any(config.get(name) not in (None, _SENTENCE) for name in ("module_input_name", "module_output_name")):
        raise ModelDirectoryError(f"{directory / CONFIG}: what is normalised is not {_SENTENCE}")


def _read_prompts(model_dir: Path) -> tuple[dict[str, str], str | None]:
    """The prompts, and the name of the one that a text gets if the request does not say."""
    config, path = read_json_if_any(model_dir, SENTENCE_MODEL_CONFIG), model_dir / SENTENCE_MODEL_CONFIG
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    # A null is no prompt, as sentence-transformers reads it.
    prompts = {name: text or "" for name, text in prompts.items()} if isinstance(prompts, dict) else None
    if prompts is None or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelDirectoryError(f"{path}: prompts is not an object with texts")
    if default is not None and (not isinstance(default, str) or default not in _PROMPTS | prompts):
        raise ModelDirectoryError(f"{path}: default_prompt_name is {default!r}, which is no prompt")
    return prompts, default


def _read_max_tokens(model_dir: Path) -> int | None:
    config, path = read_json_if_any(model_dir, SENTENCE_CONFIG), model_dir / SENTENCE_CONFIG
    if config.get("do_lower_case"):
        raise ModelDirectoryError(f"{path}: do_lower_case is set, and texts are not changed here")
    most = config.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise ModelDirectoryError(f"{path}: max_seq_length is {most!r}, not a positive integer")
    return most
