"""Converts a GGUF file to Hugging Face's layout, tensor by tensor."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.worker.weights.gguf_import.architecture import Architecture
from services.worker.weights.gguf_import.architectures import architecture_of
from services.worker.weights.gguf_import.gguf_file import GgufTensor, MalformedGgufError
from services.worker.weights.gguf_import.gguf_model import GgufModel
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.model_config import model_config
from services.worker.weights.gguf_import.publisher_sampling import publisher_sampling
from services.worker.weights.gguf_import.rope import FACTORS
from services.worker.weights.gguf_import.tensors import (
    ResultTensors,
    Rule,
    Tensor,
    UnexpectedTensorsError,
    convert_tensors,
    read_values,
)
from services.worker.weights.gguf_import.tokenizer import end_token_ids, write_tokenizer
from services.worker.weights.quantization.config import MXFP4, STACKS
from services.worker.weights.quantization.gguf_blocks import gguf_config
from services.worker.weights.safetensors_writer import write_safetensors
from shared.model_files.model_dir import CONFIG, GENERATION_CONFIG, WEIGHTS

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"

logger = logging.getLogger(__name__)


class UnimportableError(Exception):
    """The file is not GGUF, cannot be read, or its model cannot be converted; the message names it."""


def convert(
    gguf_path: Path,
    result_dir: Path,
    *,
    keeps_formats: bool = True,
    on_progress: Callable[[float], None] = lambda _: None,
) -> str:
    """Convert into the new directory `result_dir`; returns its `WeightFiles.digest()`.

    A model that is split into files is given by its first one.

    Memory is needed for the vocabulary and for parts of tensors, never for a whole one.

    Args:
        keeps_formats: Whether blocks that can be served (see `gguf_blocks`) and 16-bit floats stay as they are; all
            else becomes float32.
        on_progress: Called with the fraction of the weights written, 0 to 1.

    Raises:
        UnimportableError: the file cannot be read, is not supported, or would lose some of its contents.
        OSError: the result cannot be written.
    """
    with ExitStack() as stack:
        try:
            model = stack.enter_context(GgufModel(gguf_path))
        except MalformedGgufError as error:
            raise UnimportableError(f"{gguf_path.name} cannot be read as a GGUF file: {error}") from error
        except OSError as error:
            raise UnimportableError(f"{gguf_path.name} cannot be read: {error.strerror or error}") from error
        try:
            return _convert(model, result_dir, keeps_formats=keeps_formats, on_progress=on_progress)
        except (UnsupportedGgufError, UnexpectedTensorsError) as error:
            raise UnimportableError(f"{gguf_path.name} {error}") from error
        except MalformedGgufError as error:
            raise UnimportableError(f"{gguf_path.name} cannot be read as a GGUF file: {error}") from error


def _convert(model: GgufModel, result_dir: Path, *, keeps_formats: bool, on_progress: Callable[[float], None]) -> str:
    metadata = Metadata(model.metadata)
    tensors = {tensor.name: tensor for tensor in model.tensors}
    factors = tensors.pop(FACTORS, None)
    embedding = tensors.get(_EMBEDDING)
    vocab_size = 0 if embedding is None else embedding.shape[0]
    architecture = architecture_of(metadata, tensors.keys(), vocab_size)
    config = model_config(
        metadata,
        architecture,
        vocab_size=vocab_size,
        names=tensors.keys(),
        factors=None if factors is None else read_values(factors, 0, factors.num_rows)[0],
    )
    if keeps_formats:
        architecture.arrange(config, tensors)
    results = ResultTensors(keeps_formats)
    convert_tensors(tensors, _rules(architecture, config, tensors), architecture.sizes(config), results)
    if keeps_formats:
        _log_costs(results)
    config["dtype"] = results.float_dtype()
    if quantization := _quantization(results):
        config["quantization_config"] = quantization
    stop_ids = end_token_ids(metadata)
    config |= _token_ids(metadata, stop_ids)
    _check_space(results, result_dir.parent)
    result_dir.mkdir()
    write_tokenizer(metadata, config["vocab_size"], result_dir)
    _write_json(result_dir / CONFIG, config)
    generation = {**_token_ids(metadata, stop_ids), **publisher_sampling(model.metadata)}
    _write_json(result_dir / GENERATION_CONFIG, generation)
    return write_safetensors(result_dir / WEIGHTS, results.tensors, on_progress)


def _rules(
    architecture: Architecture, config: dict[str, Any], tensors: Mapping[str, GgufTensor]
) -> list[tuple[str, str, Rule]]:
    """All rules, with the prefixes of names in the file and in the result."""
    num_layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    parts: dict[str, set[str]] = {f"blk.{layer}.": set() for layer in range(num_layers)}
    for name in tensors:
        kind, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        if kind == "blk" and (prefix := f"blk.{number}.") in parts:
            parts[prefix].add(part)
    rules: list[tuple[str, str, Rule]] = [("", "", Tensor(_EMBEDDING, "model.embed_tokens.weight", "vocab hidden"))]
    rules.append(("", "", architecture.norm))
    if _HEAD in tensors:
        rules.append(("", "", Tensor(_HEAD, "lm_head.weight", "vocab hidden")))
    for layer, (prefix, names) in enumerate(parts.items()):
        of_layer = architecture.rules(config, layer, frozenset(names))
        drafts = layer >= config["num_hidden_layers"]
        name = architecture.draft_prefix if drafts and architecture.draft_prefix else f"model.layers.{layer}."
        rules += [(prefix, name, rule) for rule in of_layer]
    return rules


def _quantization(results: ResultTensors) -> dict[str, Any]:
    """The `quantization_config`; empty if nothing is quantised."""
    if not results.layer_to_type:
        return {"quant_method": MXFP4} if results.has_mxfp4 else {}
    return gguf_config(results.layer_to_type) | ({STACKS: MXFP4} if results.has_mxfp4 else {})


def _log_costs(results: ResultTensors) -> None:
    for kind, (stored_bytes, result_bytes) in sorted(results.costs.items()):
        logger.warning(
            "no kernel computes with this format: weights become float32",
            extra={"format": kind, "stored_bytes": stored_bytes, "result_bytes": result_bytes},
        )


def _check_space(results: ResultTensors, directory: Path) -> None:
    """Raise before hours of work rather than after them. What others write meanwhile may still fill the disk."""
    needed = sum(tensor.header.num_bytes for tensor in results.tensors)
    if needed > (free := shutil.disk_usage(directory).free):
        raise OSError(errno.ENOSPC, f"the weights take {needed} bytes, and {free} are free")


def _token_ids(metadata: Metadata, stop_ids: list[int]) -> dict[str, Any]:
    ids: dict[str, Any] = {
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": stop_ids[0] if len(stop_ids) == 1 else stop_ids or None,
        "pad_token_id": metadata.token_id("padding"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2, sort_keys=True) + "\n", encoding="utf-8")
