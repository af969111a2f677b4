"""Converts GGUF to Hugging Face's layout: transformers converts configuration and tokenizer, and is corrected here.

Only the import needs transformers and gguf.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, ReaderTensor
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from services.worker.weights.gguf_tensors import UnexpectedTensorsError, convert_tensors
from services.worker.weights.publisher_sampling import publisher_sampling, shortest_decimal
from services.worker.weights.quantization.gguf_blocks import gguf_config
from services.worker.weights.tensor_digests import Hashing
from services.worker.weights.weight_files import WeightFiles
from shared.model_dir import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, WEIGHTS, read_json
from shared.process.cores import num_usable_cores

# GGUF's name of an architecture -> transformers' name. GGUF files of Mistral use "llama".
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}

logger = logging.getLogger(__name__)

# GGUF's name of a pre-tokenizer -> its definition in tokenizer.json, where transformers' conversion is wrong.
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
# Pre-tokenizers that transformers converts correctly.
_CONVERTED_PRE_TOKENIZERS = ("qwen2",)
# Metadata keys under the architecture's name: required ones, and those that must equal the head dimension.
_REQUIRED = (
    *("context_length", "block_count", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)
_WIDTHS = ("attention.value_length", "rope.dimension_count")


class UnsupportedGgufError(Exception):
    """The file is not GGUF, or its model cannot be converted."""


def convert(gguf_path: Path, result_dir: Path, *, keeps_blocks: bool = True) -> str:
    """Convert into the new directory `result_dir`; returns its `WeightFiles.digest()`.

    Args:
        keeps_blocks: Whether matrices in a type of `BLOCK_TYPES` stay as they are; everything else becomes float32.

    Raises:
        UnsupportedGgufError: the file cannot be read, is not supported, or would lose some of its contents.
    """
    source = _Source.open(gguf_path)
    result_dir.mkdir()
    _convert_weights(source, result_dir, keeps_blocks=keeps_blocks)
    _convert_tokenizer(source, result_dir)
    with WeightFiles(result_dir, hashing=Hashing(num_threads=num_usable_cores())) as weights:
        for name in weights.names:
            weights.read(name)
        return weights.digest()


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    architecture: str
    metadata: dict[str, Any]
    """Single values only; transformers reads the long lists (vocabulary, merges)."""
    tensors: list[ReaderTensor]

    @classmethod
    def open(cls, path: Path) -> _Source:
        """Read and check everything but the weights.

        Raises:
            UnsupportedGgufError: see `convert`.
        """
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise UnsupportedGgufError(f"{path.name} cannot be read as a GGUF file: {error}") from error
        metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedGgufError(
                f"{path.name} has architecture {architecture!r}, which is not supported; supported: {supported}"
            )
        source = cls(path, architecture, metadata, reader.tensors)
        source.check()
        return source

    def value(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def head_dim(self) -> int:
        return int(
            self.value("attention.key_length") or self.value("embedding_length") // self.value("attention.head_count")
        )

    @property
    def has_experts(self) -> bool:
        return self.architecture.endswith("moe")

    def check(self) -> None:
        """Raise if required metadata is missing, or something would be ignored by the conversion."""
        if missing := [key for key in _REQUIRED if self.value(key) is None]:
            raise UnsupportedGgufError(f"{self.path.name} lacks {', '.join(missing)}")
        lost = [] if self.value("rope.scaling.type", "none") == "none" else ["rope.scaling.type"]
        lost += [key for key in _WIDTHS if self.value(key, self.head_dim) != self.head_dim]
        # Old Mistral and Mixtral files use "llama" too.
        unknown = ["attention.sliding_window"] if self.has_experts else ["attention.sliding_window", "expert_count"]
        lost += [key for key in unknown if self.value(key)]
        # Llama 3's rope scaling is stored as a tensor of factors.
        lost += sorted(tensor.name for tensor in self.tensors if tensor.name.startswith("rope_"))
        if lost:
            raise UnsupportedGgufError(f"{self.path.name} uses features that cannot be imported: {', '.join(lost)}")


def _convert_weights(source: _Source, result_dir: Path, *, keeps_blocks: bool) -> None:
    """Write configurations and weights."""
    config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    _correct(config, source)
    try:
        tensors, layer_to_type = convert_tensors(source.tensors, source.architecture, config, keeps_blocks=keeps_blocks)
    except UnexpectedTensorsError as error:
        raise UnsupportedGgufError(f"{source.path.name} {error}") from error
    if layer_to_type:
        config.quantization_config = gguf_config(layer_to_type)
    config.save_pretrained(result_dir)
    save_file(tensors, result_dir / WEIGHTS, metadata={"format": "pt"})
    generation = GenerationConfig(
        bos_token_id=source.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=source.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=source.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    generation.save_pretrained(result_dir)
    values = read_json(result_dir, GENERATION_CONFIG) | publisher_sampling(source.metadata)
    (result_dir / GENERATION_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _correct(config: Any, source: _Source) -> None:
    """Set what the conversion rounds, or leaves at another model's default."""
    config.dtype = "float32"
    config.architectures = [ARCHITECTURES[source.architecture]]
    config.rms_norm_eps = shortest_decimal(source.value("attention.layer_norm_rms_epsilon"))
    config.head_dim = source.head_dim
    if source.has_experts:
        config.moe_intermediate_size = source.value("expert_feed_forward_length")


def _convert_tokenizer(source: _Source, result_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    tokenizer.model_max_length = source.value("context_length")
    tokenizer.save_pretrained(result_dir)
    if template := source.metadata.get("tokenizer.chat_template"):
        (result_dir / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    kind = source.metadata.get("tokenizer.ggml.pre")
    if kind in _CONVERTED_PRE_TOKENIZERS:
        return
    if kind not in _PRE_TOKENIZERS:
        logger.warning("unknown pre-tokenizer: texts may be split differently than in training", extra={"kind": kind})
        return
    values = read_json(result_dir, TOKENIZER)
    values["pre_tokenizer"] = _PRE_TOKENIZERS[kind]
    (result_dir / TOKENIZER).write_text(json.dumps(values, ensure_ascii=False, indent=2), encoding="utf-8")
