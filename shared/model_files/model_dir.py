"""A model directory in Hugging Face's layout, read as data only: none of its code is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.model_files.added_tokens import with_added_tokens
from shared.model_files.missing_files import config_advice, is_lfs_pointer, tokenizer_advice, weights_advice
from shared.model_files.text_models import TEXT_MODELS, text_values, with_text_rope

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
PROCESSOR_TEMPLATE = "chat_template.json"
"""Where multimodal checkpoints of older releases have their chat template, in an object."""
MORE_TEMPLATES = "additional_chat_templates"
"""A directory of named chat templates."""
SENTENCE_MODULES = "modules.json"
"""Where sentence-transformers lists what it computes after the model; each has a directory with a config.json."""
SENTENCE_CONFIG = "sentence_bert_config.json"
"""Where it says how texts become the model's input."""
SENTENCE_MODEL_CONFIG = "config_sentence_transformers.json"
"""Where it has the prompts that it puts before texts."""
HF_QUANT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt writes how weights are quantised."""
QUANTIZE_CONFIG = "quantize_config.json"
"""The same of GPTQ's quantisers."""
QUANT_CONFIG = "quant_config.json"
"""The same of AWQ's quantisers."""
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
"""Says which tensor is in which file, where there is more than one."""


ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    *TEXT_MODELS,
)
"""What workers serve. Here, so that a launcher can tell before it starts one; they have the code."""


class ModelDirectoryError(Exception):
    """The directory is not a usable model; the message names the file."""


def display_name(model_dir: Path) -> str:
    """The directory's name, or ORG/NAME for what huggingface_hub keeps in its cache."""
    path = model_dir.resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ModelDirectoryError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(read_file(model_dir, name).decode())
    except (RecursionError, ValueError) as error:
        raise ModelDirectoryError(f"{model_dir / name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{model_dir / name}: not a JSON object")
    return value


def read_config(model_dir: Path) -> dict[str, Any]:
    """Read config.json; of a multimodal model, the language model's keys: see `text_values` and `with_text_rope`.

    Raises:
        ModelDirectoryError: the file is missing or malformed, or has a language model that is not supported.
    """
    config = read_json(model_dir, CONFIG)
    name = next((name for name in architectures_of(config) if name in ARCHITECTURES), None)
    if name is None or name not in TEXT_MODELS:
        return with_text_rope(config)
    try:
        return text_values(config, TEXT_MODELS[name])
    except ValueError as error:
        raise ModelDirectoryError(f"{CONFIG}: {error}") from error


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether only the text of the model that config.json describes is served.

    Raises:
        ModelDirectoryError: `architectures` is malformed.
    """
    return next((name for name in architectures_of(config) if name in ARCHITECTURES), None) in TEXT_MODELS


def read_json_if_any(model_dir: Path, name: str) -> dict[str, Any]:
    """The same; empty if the file is missing."""
    return read_json(model_dir, name) if (model_dir / name).exists() else {}


def read_file(model_dir: Path, name: str) -> bytes:
    """Read a whole file.

    Raises:
        ModelDirectoryError: it cannot be read, or is only a pointer to the real one; the message says what to do.
    """
    path = model_dir / name
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        advice = missing_advice(model_dir, name)
        raise ModelDirectoryError(f"{path}: {error.strerror}{advice and f': {advice}'}") from error
    except OSError as error:
        raise ModelDirectoryError(f"{path}: {error.strerror or error}") from error
    refuse_pointer(path)
    return data


def refuse_pointer(path: Path) -> None:
    """Check that a file is itself, not what Git LFS left in its place.

    Raises:
        ModelDirectoryError: it is a pointer, or cannot be read; the message says what to do.
    """
    try:
        is_pointer = is_lfs_pointer(path)
    except OSError as error:
        raise ModelDirectoryError(f"{path}: {error.strerror or error}") from error
    if is_pointer:
        raise ModelDirectoryError(
            f"{path} is a Git LFS pointer, not the file itself: install git-lfs and run `git lfs pull` in its directory"
        )


def weight_paths(model_dir: Path) -> list[Path]:
    """The files of weights, which are all there; their contents are not checked.

    Raises:
        ModelDirectoryError: there are none, or the index is malformed or names files that are missing.
    """
    if (model_dir / WEIGHTS_INDEX).exists():
        return [model_dir / name for name in shard_names(model_dir, lambda name: (model_dir / name).is_file())]
    if not (model_dir / WEIGHTS).is_file():
        raise ModelDirectoryError(f"{model_dir / WEIGHTS}: no such file; {weights_advice(model_dir)}")
    return [model_dir / WEIGHTS]


def shard_names(model_dir: Path, is_there: Callable[[str], bool]) -> list[str]:
    """The names of the files of weights that the index names, sorted.

    Args:
        is_there: Whether there is a file of this name, in the directory or on a hub.

    Raises:
        ModelDirectoryError: the index is malformed or names files that are missing.
    """
    index = model_dir / WEIGHTS_INDEX
    weight_map = read_json(model_dir, WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelDirectoryError(f"{index}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    # A shard's name is untrusted input: it must not point outside the directory.
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelDirectoryError(f"{index}: {outside[0]!r} is not a plain file name")
    if missing := [name for name in names if not is_there(name)]:
        raise ModelDirectoryError(f"{index}: files are missing: {', '.join(missing)}")
    return names


def has_chat_template(model_dir: Path) -> bool:
    """Whether a model directory has a chat template of its own, which may be malformed."""
    if (model_dir / CHAT_TEMPLATE).exists():
        return True
    try:
        configs = [read_json_if_any(model_dir, name) for name in (TOKENIZER_CONFIG, PROCESSOR_TEMPLATE)]
    except ModelDirectoryError:
        return False
    return any(config.get("chat_template") is not None for config in configs)


def missing_advice(model_dir: Path, name: str) -> str:
    """What to do where a file is missing; empty if nothing is known."""
    advice = {CONFIG: config_advice, TOKENIZER: tokenizer_advice}.get(name)
    return (advice and advice(model_dir)) or ""


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """What config.json says under that name; empty if it says nothing.

    Raises:
        ModelDirectoryError: it is not a list of names.
    """
    names = config.get("architectures")
    if names is None:
        return []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelDirectoryError(f"{CONFIG}: architectures is {names!r}, not a list of names")
    return names


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture in config.json that is served.

    Raises:
        ModelDirectoryError: there is none; the message says which are.
    """
    names = architectures_of(config)
    for name in names:
        if name in ARCHITECTURES:
            return name
    what = f"is {names}, none of which is supported" if names else "is missing or empty"
    raise ModelDirectoryError(f"{CONFIG}: architectures {what}; supported: {', '.join(sorted(ARCHITECTURES))}")


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of a directory say of its tokenizer, each read once; those that are missing are empty."""

    model_dir: Path
    text: str
    """tokenizer.json."""
    config: dict[str, Any]
    """tokenizer_config.json."""
    special_tokens_map: dict[str, Any]
    added_tokens: dict[str, Any]

    @cached_property
    def content(self) -> Any:
        """The content of tokenizer.json; raises ValueError."""
        return json.loads(self.text)

    @cached_property
    def complete_content(self) -> Any:
        """The same with the tokens that the other files add to it or declare as special.

        Raises:
            ModelDirectoryError: a file is malformed.
        """
        others = (self.config, self.special_tokens_map, self.added_tokens)
        try:
            return with_added_tokens(self.content, *others) if any(others) else self.content
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            names = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
            files = ", ".join(name for name in names if (self.model_dir / name).exists())
            path = self.model_dir / TOKENIZER
            raise ModelDirectoryError(f"{path}: cannot read the tokens ({files}): {error!r}") from error

    @cached_property
    def complete_text(self) -> str:
        """The text of tokenizer.json if the other files add no token to it, else JSON of the same form.

        Raises:
            ModelDirectoryError: a file is malformed.
        """
        if not (self.config or self.special_tokens_map or self.added_tokens):
            return self.text
        return self.text if self.complete_content is self.content else json.dumps(self.complete_content)


def read_tokenizer_files(model_dir: Path) -> TokenizerFiles:
    """Read what a directory says of its tokenizer.

    Raises:
        ModelDirectoryError: tokenizer.json is missing, or a file is malformed.
    """
    try:
        text = read_file(model_dir, TOKENIZER).decode()
    except ValueError as error:
        raise ModelDirectoryError(f"{model_dir / TOKENIZER}: {error}") from error
    names = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS)
    return TokenizerFiles(model_dir, text, *(read_json_if_any(model_dir, name) for name in names))


def digest_of(config: bytes, tokenizer: TokenizerFiles) -> str:
    """What a model's services must agree on: SHA-256 over the configuration and the tokenizer with all tokens, in hex.

    Raises:
        ModelDirectoryError: a file that names tokens is malformed.
    """
    digest = hashlib.sha256()
    for name, data in ((CONFIG, config), (TOKENIZER, tokenizer.complete_text.encode())):
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def read_tokenizer(model_dir: Path) -> str:
    """`TokenizerFiles.complete_text` of a directory, for those that need nothing else of it; raises as both."""
    return read_tokenizer_files(model_dir).complete_text


def model_digest(model_dir: Path) -> str:
    """`digest_of` a directory's files, for those that need nothing else of them.

    Raises:
        ModelDirectoryError: a file is missing, or one that names tokens is malformed.
    """
    return digest_of(read_file(model_dir, CONFIG), read_tokenizer_files(model_dir))


def vocabulary_size(model_dir: Path) -> int | None:
    """The configured vocabulary size; None if there is none.

    Raises:
        ModelDirectoryError: the file is malformed.
    """
    size = read_config(model_dir).get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise ModelDirectoryError(f"{model_dir / CONFIG}: vocab_size is {size!r}, not a positive integer")
    return size


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence tokens, from the generation or else the model configuration; may be empty.

    Raises:
        ModelDirectoryError: a file is malformed, or a token is not in the vocabulary.
    """
    name, value = GENERATION_CONFIG, read_json_if_any(model_dir, GENERATION_CONFIG).get("eos_token_id")
    if value is None:
        name, value = CONFIG, read_config(model_dir).get("eos_token_id")
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
