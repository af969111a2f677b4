"""Quantises checkpoints with AMD's Quark, unchanged: `write.py < jobs`, a JSON list.

A job is `[result_dir, model_dir, {"weight": [spec, arguments], "pack_method": …}]`; `spec` is a class of the library's
configuration. A line is written for each: `[result_dir, null or what the library said]`. Beside the checkpoint is
`values.safetensors`: the weights that the library itself computes with.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization.config import config as specs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def write(result_dir: str, model_dir: str, options: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    spec, arguments = options["weight"]
    weight = getattr(specs, spec)(**arguments).to_quantization_spec()
    layer = specs.QLayerConfig(weight=weight)
    config = specs.QConfig(global_quant_config=layer, exclude=["lm_head"])
    tokens = [torch.arange(2, 34).reshape(1, -1)]
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, tokens))
    with torch.no_grad(), TemporaryDirectory() as plain:
        export_safetensors(model, plain, weight_format="fake_quantized")
        values = {name: each for path in Path(plain).glob("*.safetensors") for name, each in load_file(path).items()}
        export_safetensors(model, result_dir, pack_method=options.get("pack_method", "reorder"))
    save_file(
        {name: each for name, each in values.items() if name.endswith("_proj.weight")},
        f"{result_dir}/values.safetensors",
    )


for result_dir, model_dir, options in json.load(sys.stdin):
    said = None
    try:
        write(result_dir, model_dir, options)
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write("\n" + json.dumps([result_dir, said]) + "\n")
    sys.stdout.flush()
