"""What a model directory has in place of a file that is needed, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

ADAPTER = "adapter_config.json"
TEKKEN = "tekken.json"
"""Mistral's own format of vocabularies."""
TIKTOKEN = "tiktoken.model"
"""Kimi's vocabulary, which `tiktoken_vocabulary` converts."""

_LFS_START = b"version https://git-lfs.github.com/spec/v1"
# Vocabularies in formats that transformers converts, as glob patterns.
_OLDER_VOCABULARIES = ("tokenizer.model", "*.tiktoken", "*.model", "vocab.*")
_PARAMS = "params.json"
_MISTRALS = (_PARAMS, "consolidated*.safetensors")
# A key of params.json, and transformers' script for models that have it. The first one counts.
_MISTRAL_SCRIPTS = (("llama_4_scaling", "ministral3"), ("vision_encoder", "mistral3"))
_SAVE_TOKENIZER = "load the directory with transformers' AutoTokenizer and save it here with save_pretrained"
_SAVE_MODEL = "load the directory with transformers' AutoModelForCausalLM and save it with save_pretrained"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what `git clone` leaves of a large one where Git LFS is not installed.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_LFS_START)) == _LFS_START


def tokenizer_advice(model_dir: Path) -> str | None:
    """What to do where tokenizer.json is missing; None if there is no vocabulary in any format."""
    if (model_dir / TEKKEN).exists():
        return (
            f"the vocabulary is in Mistral's own format ({TEKKEN}), which is not read: take the files in Hugging "
            f"Face's format (tokenizer.json, tokenizer_config.json and the chat template), or {_SAVE_TOKENIZER}, with "
            "mistral_format=False where mistral-common is installed; the chat template is not in it"
        )
    if (model_dir / TIKTOKEN).exists():
        return f"the vocabulary is in {TIKTOKEN}: make it of that with `lockstep import {model_dir}`"
    found = _first(model_dir, _OLDER_VOCABULARIES)
    return None if found is None else f"the vocabulary is in {found}, which must be converted: {_SAVE_TOKENIZER}"


def config_advice(model_dir: Path) -> str | None:
    """What to do where config.json is missing; None if nothing is known."""
    return _mistral_advice(model_dir) or _other_model_advice(model_dir)


def weights_advice(model_dir: Path) -> str:
    """What to do where model.safetensors and its index are missing."""
    if shards := _all(model_dir, ["*-of-*.safetensors"], but=_MISTRALS):
        return (
            f"there are shards ({_listed(shards)}) but no model.safetensors.index.json, which says what is in them: "
            "download it from where they are from"
        )
    if advice := _mistral_advice(model_dir):
        return advice
    if others := _all(model_dir, ["*.safetensors"], but=["adapter_*"]):
        return f"there is {_listed(others)}: a model in one file must be called model.safetensors"
    if pickled := _all(model_dir, ["*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"], but=["adapter_*"]):
        return f"the weights are in {_listed(pickled)}, whose format can run code and is not read: {_SAVE_MODEL}"
    return _other_model_advice(model_dir) or "the directory has no weights"


def _mistral_advice(model_dir: Path) -> str | None:
    groups = [_all(model_dir, [pattern]) for pattern in (*_MISTRALS, TEKKEN)]
    if not any(groups[: len(_MISTRALS)]):
        return None
    found = ", ".join(_listed(names) for names in groups if names)
    return (
        f"the directory is in Mistral's own format ({found}), which is not read: take the files in Hugging Face's "
        "format (config.json, model*.safetensors and tokenizer.json), or "
        f"convert them with convert_{_mistral_kind(model_dir)}_weights_to_hf.py of transformers' repository"
    )


def _mistral_kind(model_dir: Path) -> str:
    """What transformers calls the model that params.json describes."""
    try:
        params = json.loads((model_dir / _PARAMS).read_bytes())
    except (OSError, RecursionError, ValueError):
        params = None
    keys = params if isinstance(params, dict) else {}
    return next((kind for key, kind in _MISTRAL_SCRIPTS if keys.get(key)), "mistral")


def _other_model_advice(model_dir: Path) -> str | None:
    if (model_dir / ADAPTER).exists():
        return (
            f"the directory has an adapter ({ADAPTER}) but not its base model: merge the two, for example with PEFT's "
            "merge_and_unload, and save the result"
        )
    if gguf := _all(model_dir, ["*.gguf"]):
        return f"there is {_listed(gguf)}: serve that file itself, with `lockstep serve {model_dir / gguf[0]}`"
    return None


def _first(model_dir: Path, patterns: Iterable[str]) -> str | None:
    return next((name for pattern in patterns for name in _all(model_dir, [pattern])), None)


def _all(model_dir: Path, patterns: Iterable[str], *, but: Iterable[str] = ()) -> list[str]:
    left_out = {path.name for pattern in but for path in model_dir.glob(pattern)}
    return sorted({path.name for pattern in patterns for path in model_dir.glob(pattern)} - left_out)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
