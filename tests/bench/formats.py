"""What the published formats of checkpoints take on disk, while they are loaded and while they are served.

Figures are bits per weight of a random Llama's matrices, in a process that computes in bfloat16, with groups of 128
where a format has groups of any size. Memory is anonymous: pages of mapped files are not counted. While loading it is
the peak. `native` keeps tiles of its own; `kept` is what `triton` and `aiter` hold on the device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bench.parts.report import Row, report
from tests.support.models.published_formats import PUBLISHED, awq, gptq, quark_int4
from tests.support.models.quantized_checkpoints import SCHEMES, WEIGHTS, Quantized, Scheme, write_quantized
from tests.support.models.tiny_llama import TINY_CONFIG, tensor_shapes, write_tiny_llama
from tests.support.system.processes import ROOT, module_environment

_GROUP = 128
_BACKENDS = {"native": "native", "kept": "packing"}


def _with_groups(name: str, quantize: Any) -> Scheme:
    scheme = PUBLISHED[name]
    config = json.loads(json.dumps(scheme.config).replace('"group_size": 32', f'"group_size": {_GROUP}'))
    return replace(scheme, config=config, quantize=partial(quantize, group_size=_GROUP))


_FORMATS: dict[str, Scheme | None] = {
    "bf16": None,
    "FP8, blocks of 128x128": SCHEMES["fp8, blocks of a size that nothing divides"],
    "ModelOpt FP8, Quark FP8": PUBLISHED["modelopt fp8"],
    "Quark int8": PUBLISHED["quark int8"],
    "GPTQ, 8 bits": PUBLISHED["gptq, 8 bits"],
    "AWQ": _with_groups("awq", awq),
    "GPTQ, symmetric": _with_groups("gptq", gptq),
    "GPTQ, desc_act": _with_groups("gptq, activation order", partial(gptq, is_shuffled=True)),
    "Quark uint4": _with_groups("quark uint4", quark_int4),
    "Quark and compressed-tensors MXFP4": PUBLISHED["quark mxfp4"],
    "ModelOpt and compressed-tensors NVFP4": PUBLISHED["modelopt nvfp4"],
}


def _quantize_float32(scheme: Scheme, weight: Tensor) -> Quantized:
    """As quantisers do, whatever the weights are stored in."""
    return scheme.quantize(weight.float())


def _memory(model_dir: Path, backend: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.models.load_memory", "--dtype=bfloat16", str(model_dir), backend]
    done = subprocess.run(command, cwd=ROOT, env=module_environment(), stdout=subprocess.PIPE, text=True, check=True)
    memory: dict[str, int] = json.loads(done.stdout)
    return memory


def _measure(plain: Path, config: dict[str, Any], name: str) -> Iterator[Row]:
    """One format."""
    shapes = tensor_shapes(config)
    num_weights = sum(prod(shape) for tensor, shape in shapes.items() if tensor.endswith("_proj.weight"))
    num_embedding_bytes = 2 * prod(shapes["model.embed_tokens.weight"])
    scheme = _FORMATS[name]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = plain
        if scheme is not None:
            exact = replace(scheme, quantize=partial(_quantize_float32, scheme))
            model_dir, _ = write_quantized(plain, Path(folder), exact)
        num_bytes = (model_dir / WEIGHTS).stat().st_size - num_embedding_bytes
        yield Row(f"{name}: on disk", 8 * num_bytes / num_weights, "bits")
        for label, backend in _BACKENDS.items():
            memory = _memory(model_dir, backend)
            for moment, key in (("loading", "peak"), ("serving", "kept")):
                bits = 8 * (memory[key] - num_embedding_bytes) / num_weights
                yield Row(f"{name}: {moment}, {label}", bits, "bits")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=_FORMATS, default=[*_FORMATS])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden, "vocab_size": 512}
    heads = {
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": arguments.hidden // 128,
        "head_dim": 64,
    }
    config = {**TINY_CONFIG, **sizes, **heads, "num_hidden_layers": arguments.layers}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        plain = write_tiny_llama(Path(folder) / "plain", changes=config)
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / WEIGHTS).items()}
        save_file(tensors, plain / WEIGHTS, metadata={"format": "pt"})
        for name in arguments.formats:
            print(f"{name} …", file=sys.stderr)
            rows += _measure(plain, config, name)
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
