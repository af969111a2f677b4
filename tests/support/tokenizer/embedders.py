"""Directories of embedders as they are published: base classes with sentence-transformers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from shared.model_files.model_dir import (
    CONFIG,
    SENTENCE_CONFIG,
    SENTENCE_MODEL_CONFIG,
    SENTENCE_MODULES,
    TOKENIZER,
    WEIGHTS,
)
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer

# Of Qwen3-Embedding's files, in their form.
PROMPTS = {"query": "Instruct: Find what answers the query\nQuery:", "document": ""}
LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
_KINDS = "sentence_transformers.models."


def write_tokenizer_of_embedder(model_dir: Path, size: int, **files: Any) -> Path:
    """Write what a tokenizer service of an embedder reads, whose vectors have `size` numbers; returns `model_dir`."""
    write_embedder_files(model_dir, **files)
    write_tiny_tokenizer(model_dir)
    config = json.loads((model_dir / CONFIG).read_text(encoding="utf-8"))
    _write(model_dir / CONFIG, {**config, "hidden_size": size})
    return model_dir


def modules_of(*kinds: str) -> list[dict[str, Any]]:
    """The content of modules.json."""
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    return [
        {"idx": number, "name": str(number), "path": path, "type": f"{_KINDS}{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


def write_embedder_files(
    model_dir: Path,
    *,
    pooling: Mapping[str, Any] = LAST,
    kinds: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
    config: Mapping[str, Any] | None = None,
    sentence_config: Mapping[str, Any] | None = None,
) -> None:
    """Write what sentence-transformers writes for an embedder.

    Args:
        model_dir: The directory.
        pooling: The content of Pooling's configuration.
        kinds: The modules.
        config: The content of `config_sentence_transformers.json`.
        sentence_config: The content of `sentence_bert_config.json`; None leaves it out, as Qwen3-Embedding does.
    """
    model_dir.mkdir(exist_ok=True)
    _write(model_dir / SENTENCE_MODULES, modules_of(*kinds))
    (model_dir / "1_Pooling").mkdir(exist_ok=True)
    _write(model_dir / "1_Pooling" / CONFIG, pooling)
    _write(model_dir / SENTENCE_MODEL_CONFIG, {"prompts": PROMPTS} if config is None else config)
    if sentence_config is not None:
        _write(model_dir / SENTENCE_CONFIG, sentence_config)


def make_base_class(model_dir: Path) -> None:
    """Turn a checkpoint of a whole model into one of its base class: no head, and no prefix."""
    path = model_dir / WEIGHTS
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items() if "lm_head" not in name}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((model_dir / CONFIG).read_text(encoding="utf-8"))
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "Model")]
    _write(model_dir / CONFIG, config)


def append_token(model_dir: Path, token: str) -> int:
    """Let the tokenizer append a token to every text, as Qwen3-Embedding's does; returns its id."""
    path = model_dir / TOKENIZER
    tokenizer = Tokenizer.from_file(str(path))
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    tokenizer.post_processor = TemplateProcessing(single=f"$A {token}", special_tokens=[(token, token_id)])
    tokenizer.save(str(path))
    return int(token_id)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
