"""GGUF to Hugging Face's layout, by transformers' own conversion and what has to be put right after it.

The only module of the worker that needs transformers and gguf.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from services.worker.weights import WeightFiles
from shared.model_dir import CHAT_TEMPLATE, TOKENIZER, read_json

ARCHITECTURE = "llama"

logger = logging.getLogger(__name__)

# What GGUF calls a pre-tokenizer -> its definition in tokenizer.json, where transformers' conversion builds another.
# Source: llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM.
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
}


class UnsupportedGgufError(Exception):
    """The file is no GGUF, or of an architecture that is not supported."""


def convert(gguf_path: Path, result_dir: Path) -> str:
    """Write the model of `gguf_path` into the new directory `result_dir`, its weights as float32.

    Returns:
        `WeightFiles.digest()` of the result.

    Raises:
        UnsupportedGgufError: the file cannot be read, or is not of the llama architecture.
    """
    metadata = _read_metadata(gguf_path)
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedGgufError(f"{gguf_path.name} is of architecture {architecture!r}, not {ARCHITECTURE!r}")
    _convert_weights(gguf_path, metadata, result_dir)
    _convert_tokenizer(gguf_path, metadata, result_dir)
    with WeightFiles(result_dir) as weights:
        for name in weights.names:
            weights.read(name)
        return weights.digest()


def _read_metadata(gguf_path: Path) -> dict[str, Any]:
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, OSError) as error:
        raise UnsupportedGgufError(f"{gguf_path.name} is no readable GGUF file: {error}") from error
    # Long lists (vocabulary, merges) are left to transformers.
    return {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}


def _convert_weights(gguf_path: Path, metadata: dict[str, Any], result_dir: Path) -> None:
    """Write configuration, generation configuration and weights.

    Uses transformers' conversion at the level below `from_pretrained`, which asks for accelerate and returns a
    model that refuses `save_pretrained`.
    """
    config = LlamaConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    config.rms_norm_eps = shortest_decimal(metadata["llama.attention.layer_norm_rms_epsilon"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=model)
    missing, _ = model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    if set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise UnsupportedGgufError(f"{gguf_path.name} lacks tensors: {', '.join(missing)}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )
    model.save_pretrained(result_dir)


def _convert_tokenizer(gguf_path: Path, metadata: dict[str, Any], result_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.model_max_length = metadata["llama.context_length"]
    tokenizer.save_pretrained(result_dir)
    if template := metadata.get("tokenizer.chat_template"):
        (result_dir / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    kind = metadata.get("tokenizer.ggml.pre")
    if kind not in _PRE_TOKENIZERS:
        logger.warning("an unknown pre-tokenizer: texts may be split otherwise than in training", extra={"kind": kind})
        return
    values = read_json(result_dir, TOKENIZER)
    values["pre_tokenizer"] = _PRE_TOKENIZERS[kind]
    (result_dir / TOKENIZER).write_text(json.dumps(values, ensure_ascii=False, indent=2), encoding="utf-8")


def shortest_decimal(value: float) -> float:
    """The number that somebody wrote before it was stored as float32: 9.999999747e-06 was 1e-05."""
    return float(str(np.float32(value)))
