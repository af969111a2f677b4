"""Quantises checkpoints with compressed-tensors, unchanged: `write.py < jobs`, a JSON list.

A job is `[result_dir, model_dir, quantization_config]`. Scales come from the extremes of weights, by the library's own
functions. A line is written for each: `[result_dir, null or what the library said]`. Beside the checkpoint is
`values.safetensors`: what the library itself decompresses the weights to.
"""

import json
import sys
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStrategy,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def groups_of(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """The weights that share each scale, in the last dimension; the others are the scales' shape."""
    rows, columns = weight.shape
    if args.strategy == QuantizationStrategy.TENSOR:
        return weight.reshape(1, -1)
    if args.strategy == QuantizationStrategy.CHANNEL:
        return weight.reshape(rows, 1, -1)
    if args.strategy == QuantizationStrategy.BLOCK:
        height, width = args.block_structure
        return weight.reshape(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    return weight.reshape(rows, -1, args.group_size)


def calibrate(module: Any) -> None:
    args, weight = module.quantization_scheme.weights, module.weight.data
    groups = groups_of(weight, args)
    low, high = groups.amin(-1), groups.amax(-1)
    overall = None
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        overall = generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data = overall
    scale, zero_point = calculate_qparams(low, high, args, global_scale=overall)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero_point


def write(result_dir: str, model_dir: str, config: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parsed = QuantizationConfig.model_validate(config)
    apply_quantization_config(model, parsed)
    layers = {name: each for name, each in model.named_modules() if getattr(each, "quantization_scheme", None)}
    weighted = {name: each for name, each in layers.items() if hasattr(each, "weight")}
    for module in weighted.values():
        calibrate(module)
    for name, module in layers.items():
        for letter in "kv" if name not in weighted else "":
            getattr(module, f"{letter}_scale").data.fill_(0.25 if letter == "k" else 0.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(result_dir)
    compressor.update_config(result_dir)
    compressor.decompress_model(model)
    values = {f"{name}.weight": module.weight.data.contiguous() for name, module in weighted.items()}
    save_file(values, f"{result_dir}/values.safetensors")


for result_dir, model_dir, config in json.load(sys.stdin):
    said = None
    try:
        write(result_dir, model_dir, config)
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps([result_dir, said]) + "\n")
    sys.stdout.flush()
