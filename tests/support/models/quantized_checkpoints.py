"""Checkpoints in published quantisation formats, made from plain ones: the stored tensors and the values they encode.

Values are quantised in the simplest way that fits the format, and dequantised value by value or block by block, so that
the expected values do not share the loader's optimisations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
# Suffixes of the names of linear layers and of stacks of them.
_LINEAR = ("_proj", "_proj_with_mqa", ".w1", ".w2", ".w3", "lm_head")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True)
class Quantized:
    """One layer: its stored tensors by name suffix, and the float32 matrix that they encode."""

    tensors: Mapping[str, Tensor]
    values: Tensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantisation scheme of a checkpoint."""

    config: Mapping[str, Any]
    """The `quantization_config` of config.json."""
    quantize: Callable[[Tensor], Quantized]
    plain: tuple[str, ...] = ()
    """Name suffixes of layers that are not quantised."""
    others: Mapping[str, Callable[[Tensor], Quantized]] = field(default_factory=dict)
    """The quantisation of layers that differ from `quantize`, by name suffix."""


def fp8_blocks(
    weight: Tensor, block: tuple[int, int], *, suffix: str = ".weight_scale_inv", dtype: torch.dtype | None = None
) -> Quantized:
    """Quantise to e4m3fn with a scale per block; blocks at the edges are smaller."""
    stored = torch.empty(weight.shape, dtype=dtype or torch.float8_e4m3fn)
    num_blocks = [-(-size // block_size) for size, block_size in zip(weight.shape, block, strict=True)]
    scales, values = torch.empty(num_blocks), torch.empty(weight.shape)
    for i in range(num_blocks[0]):
        for j in range(num_blocks[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / torch.finfo(stored.dtype).max
            stored[place] = (weight[place] / scales[i, j]).to(stored.dtype)
            values[place] = stored[place].float() * scales[i, j]
    return Quantized({".weight": stored, suffix: scales}, values)


def fp8_tensor(weight: Tensor) -> Quantized:
    """Quantise to e4m3fn with one scalar scale, and one for activations, as vLLM's quantiser wrote it."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": stored, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return Quantized(tensors, stored.float() * scale)


def fp8_channels(weight: Tensor) -> Quantized:
    """Quantise to e4m3fn with a scale per output channel."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return Quantized({".weight": stored, ".weight_scale": scales}, stored.float() * scales)


def int8_channels(weight: Tensor, highest: int = 127) -> Quantized:
    """Quantise to int8, up to `highest`, with a scale per output channel, as W8A8 and W4A8 store weights."""
    scales = weight.abs().amax(dim=1, keepdim=True) / highest
    stored = (weight / scales).round().to(torch.int8)
    return Quantized({".weight": stored, ".weight_scale": scales}, stored.float() * scales)


def int8_channels_asymmetric(weight: Tensor) -> Quantized:
    """Quantise to int8 with a scale and a zero point per output channel."""
    low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    scales = (high - low) / 255
    zero_points = (-128 - low / scales).round()
    stored = (weight / scales + zero_points).round().clamp(-128, 127).to(torch.int8)
    tensors = {".weight": stored, ".weight_scale": scales, ".weight_zero_point": zero_points.to(torch.int8)}
    return Quantized(tensors, (stored.float() - zero_points) * scales)


def packed(
    weight: Tensor, *, num_bits: int, group_size: int | None, is_symmetric: bool = True, is_shuffled: bool = False
) -> Quantized:
    """Quantise to integers packed into int32, with a scale (and a zero point) per row and group of columns.

    Args:
        num_bits: 4 or 8.
        group_size: Columns that share a scale; None means all.
        is_symmetric: Whether to omit zero points.
        is_shuffled: Whether groups are arbitrary sets of columns, stored as an index, instead of consecutive columns.
    """
    num_rows, num_columns = weight.shape
    size = group_size or num_columns
    groups = torch.arange(num_columns) // size
    if is_shuffled:
        groups = groups[torch.randperm(num_columns, generator=torch.Generator().manual_seed(4))]
    lowest, highest = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    num_groups = int(groups.max()) + 1
    scales, zero_points = torch.empty(num_rows, num_groups), torch.zeros(num_rows, num_groups)
    stored, values = torch.empty(weight.shape, dtype=torch.int64), torch.empty(weight.shape)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if is_symmetric:
            scales[:, group] = part.abs().amax(dim=1) / highest
        else:
            scales[:, group] = (part.amax(dim=1) - part.amin(dim=1)) / (highest - lowest)
            zero_points[:, group] = (lowest - part.amin(dim=1) / scales[:, group]).round().clamp(lowest, highest)
        scale, zero_point = scales[:, group, None], zero_points[:, group, None]
        stored[:, groups == group] = (part / scale + zero_point).round().clamp(lowest, highest).long()
        values[:, groups == group] = (stored[:, groups == group] - zero_point) * scale
    tensors = {
        ".weight_packed": pack_rows(stored, num_bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors[".weight_zero_point"] = pack_rows(zero_points.long().T, num_bits).T.contiguous()
    if is_shuffled:
        tensors[".weight_g_idx"] = groups.to(torch.int32)
    return Quantized(tensors, values)


def pack_rows(values: Tensor, num_bits: int) -> Tensor:
    """Pack signed numbers [n, m] into int32 words [n, m * num_bits / 32], lowest bits first, padded with 0."""
    offset, per_word = 1 << (num_bits - 1), 32 // num_bits
    rows = []
    for row in values.tolist():
        words = [row[start : start + per_word] for start in range(0, len(row), per_word)]
        rows.append([sum((value + offset) << (num_bits * i) for i, value in enumerate(word)) for word in words])
    return torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def mxfp4_stack(weight: Tensor) -> Quantized:
    """Quantise experts [E, in, out] to MXFP4 as gpt-oss stores them; `in` must be a multiple of 32."""
    num_experts, in_features, out_features = weight.shape
    groups = weight.transpose(1, 2).reshape(num_experts, out_features, in_features // 32, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(dim=-1).clamp(min=2.0**-100))) - 2
    codes = ((groups / 2.0 ** exponents[..., None])[..., None] - torch.tensor(E2M1)).abs().argmin(dim=-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    values = torch.tensor(E2M1)[codes] * 2.0 ** exponents[..., None]
    tensors = {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}
    return Quantized(tensors, values.flatten(2).transpose(1, 2).contiguous())


def _compressed(weights: Mapping[str, Any], name: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {**group, **more}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


def _scheme(weights: Mapping[str, Any], name: str, quantize: Callable[[Tensor], Quantized], **more: Any) -> Scheme:
    return Scheme(_compressed(weights, name, **more), quantize, plain=("lm_head",))


_MIXED = {
    **_compressed(_INT4, "mixed-precision", format="pack-quantized"),
    "ignore": ["lm_head", "re:.*layers\\.0\\.mlp\\..*"],
}
_MIXED["config_groups"]["group_1"] = {
    "targets": ["re:.*o_proj$", "re:.*down_proj"],
    "weights": {**_FP8, "strategy": "channel"},
    "format": "float-quantized",
}

SCHEMES: dict[str, Scheme] = {
    "fp8, blocks": Scheme(
        # As DeepSeek publishes it: the configuration does not list the head as unquantised.
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]},
        lambda weight: fp8_blocks(weight, (24, 40)),
        plain=("lm_head", "layers.1.mlp.down_proj"),
    ),
    "fp8, blocks of a size that nothing divides": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda weight: fp8_blocks(weight, (128, 128)),
        plain=("lm_head",),
    ),
    "fp8, e5m2": Scheme(
        {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]},
        lambda weight: fp8_blocks(weight, (16, 16), dtype=torch.float8_e5m2),
        plain=("lm_head",),
    ),
    "fp8, tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.0.mlp"]},
        fp8_tensor,
        plain=("lm_head", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"),
    ),
    "fp8, channels": Scheme(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8_channels, ("lm_head",)
    ),
    "compressed fp8, channels": _scheme({**_FP8, "strategy": "channel"}, "float-quantized", fp8_channels),
    "compressed fp8, tensor": _scheme({**_FP8, "strategy": "tensor"}, "float-quantized", fp8_tensor),
    "compressed fp8, blocks": _scheme(
        {**_FP8, "strategy": "block", "block_structure": [32, 48]},
        "float-quantized",
        lambda weight: fp8_blocks(weight, (32, 48), suffix=".weight_scale"),
    ),
    "compressed int8, W8A8": _scheme(
        {**_INT8, "strategy": "channel"}, "int-quantized", int8_channels, input_activations=_TOKEN
    ),
    "compressed int4 in bytes, W4A8": _scheme(
        {**_INT8, "num_bits": 4, "strategy": "channel"}, "int-quantized", lambda weight: int8_channels(weight, 7)
    ),
    "compressed int8, asymmetric": _scheme(
        {**_INT8, "strategy": "channel", "symmetric": False}, "int-quantized", int8_channels_asymmetric
    ),
    "compressed int8, weights alone": _scheme(
        {**_INT8, "strategy": "channel"},
        "pack-quantized",
        lambda weight: packed(weight, num_bits=8, group_size=None),
    ),
    "compressed int4, groups": _scheme(
        _INT4, "pack-quantized", lambda weight: packed(weight, num_bits=4, group_size=16)
    ),
    "compressed int4, asymmetric": _scheme(
        {**_INT4, "symmetric": False},
        "pack-quantized",
        lambda weight: packed(weight, num_bits=4, group_size=16, is_symmetric=False),
    ),
    "compressed int4, channels": _scheme(
        {**_INT4, "strategy": "channel", "group_size": None, "symmetric": False},
        "pack-quantized",
        lambda weight: packed(weight, num_bits=4, group_size=None, is_symmetric=False),
    ),
    "compressed int4, activation order": _scheme(
        {**_INT4, "actorder": "group"},
        "pack-quantized",
        lambda weight: packed(weight, num_bits=4, group_size=16, is_shuffled=True),
    ),
    "mixed": Scheme(
        _MIXED,
        lambda weight: packed(weight, num_bits=4, group_size=16),
        plain=("lm_head", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"),
        others={"o_proj": fp8_channels, "down_proj": fp8_channels},
    ),
}

# gpt-oss's experts; none of its other layers is quantised.
MXFP4 = Scheme(
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
    mxfp4_stack,
    plain=("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"),
)


# Kimi K2's routed experts; none of its other layers is quantised.
KIMI_INT4 = Scheme(
    {
        **_compressed({**_INT4, "group_size": 32, "actorder": None, "observer": "minmax"}, "pack-quantized"),
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
    lambda weight: packed(weight, num_bits=4, group_size=32),
    plain=(
        *("lm_head", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *(f"{part}.{name}_proj" for part in ("mlp", "shared_experts") for name in ("gate", "up", "down")),
    ),
)


def write_quantized(model_dir: Path, out_dir: Path, scheme: Scheme) -> tuple[Path, Path]:
    """Write a plain checkpoint quantised by `scheme`, and a plain one with the dequantised values.

    Returns:
        Their directories, `out_dir / "quantized"` and `out_dir / "values"`.
    """
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(model_dir / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(_LINEAR) or layer.endswith(scheme.plain):
            stored[name] = values[name] = tensor
            continue
        quantize = next((other for end, other in scheme.others.items() if layer.endswith(end)), scheme.quantize)
        quantized = quantize(tensor)
        stored.update({layer + suffix: part for suffix, part in quantized.tensors.items()})
        values[name] = quantized.values
    config = json.loads((model_dir / "config.json").read_text())
    write_checkpoint(model_dir, out_dir / "quantized", {**config, "quantization_config": scheme.config}, stored)
    write_checkpoint(model_dir, out_dir / "values", config, values)
    return out_dir / "quantized", out_dir / "values"


def write_checkpoint(model_dir: Path, out_dir: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a copy of `model_dir` with a different configuration and different tensors."""
    shutil.copytree(model_dir, out_dir, ignore=shutil.ignore_patterns("*.safetensors"))
    (out_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, out_dir / WEIGHTS, metadata={"format": "pt"})
