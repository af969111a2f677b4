"""`quant_method` compressed-tensors: groups of layers, each with its own scheme and format.

Source: compressed-tensors 0.20: quantization/quant_config.py and quant_args.py (fields), lifecycle/apply.py and
utils/match.py (which group a layer belongs to).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.worker.weights.quantization.layer_format import LayerFormat
from services.worker.weights.quantization.mxfp4 import Mxfp4Format
from services.worker.weights.quantization.nvfp4 import NVFP4_GROUP_SIZE, Nvfp4Format
from services.worker.weights.quantization.packed_int import PackedIntFormat
from services.worker.weights.quantization.rules import FormatRules, UnsupportedFormatError, matches_expression
from services.worker.weights.quantization.scaled import (
    CHANNEL,
    FP8_DTYPES,
    INT8_DTYPES,
    TENSOR,
    Granularity,
    ScaledFormat,
)

# The transformers class of every layer that the rules apply to.
_CLASS = "Linear"
_SUPPORTED = (
    "float-quantized with 8 bits, int-quantized and naive-quantized with 2 to 8, pack-quantized with 4 or 8, "
    "strategies tensor, channel, group and block; mxfp4-pack-quantized and nvfp4-pack-quantized"
)
_IN_BYTES = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED_FP4 = ".weight_packed"
# The formats of 4-bit floats, each with its columns that share a scale.
_FP4_FORMATS: dict[str, tuple[LayerFormat, int]] = {
    "mxfp4-pack-quantized": (Mxfp4Format(_PACKED_FP4), 32),
    "nvfp4-pack-quantized": (Nvfp4Format(_PACKED_FP4, ".weight_global_scale", is_divisor=True), NVFP4_GROUP_SIZE),
}


def compressed_tensors_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse the `quantization_config`.

    Raises:
        UnsupportedFormatError: a scheme is not supported.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    _refuse_extras(values)
    ignored = [_matches(str(pattern)) for pattern in values.get("ignore") or []]
    targets = [
        (str(target), layer_format)
        for group in values["config_groups"].values()
        for layer_format in [_layer_format(group, values.get("format"))]
        for target in group["targets"]
    ]
    # From most to least specific: a layer's name, a regular expression, its class.
    targets.sort(key=lambda rule: (rule[0] == _CLASS, rule[0].startswith("re:"), rule[0]))
    rules = [(_matches(target), layer_format) for target, layer_format in targets]
    return FormatRules(((lambda layer: any(matches(layer) for matches in ignored), None), *rules))


def _refuse_extras(values: Mapping[str, Any]) -> None:
    """Raise if weights are also sparse or transformed."""
    sparsity = (values.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedFormatError(f"sparsity format {sparsity!r} is not supported; supported: dense")
    if (values.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedFormatError("transform_config is not supported")


def _matches(target: str) -> Callable[[str], bool]:
    if target.startswith("re:"):
        return matches_expression(target.removeprefix("re:"))
    return lambda layer: target in (layer, _CLASS)


def _layer_format(group: Mapping[str, Any], default_format: str | None) -> LayerFormat | None:
    weights = group.get("weights")
    if weights is None:
        return None
    name = group.get("format") or default_format
    kind, num_bits = str(weights.get("type", "int")).lower(), int(weights.get("num_bits", 8))
    is_symmetric = bool(weights.get("symmetric", True))
    if name == "dense":
        return None
    if name in _FP4_FORMATS and kind == "float" and num_bits == 4 and is_symmetric:
        layer_format, group_size = _FP4_FORMATS[name]
        if weights.get("group_size", group_size) == group_size:
            return layer_format
        raise UnsupportedFormatError(f"group_size {weights['group_size']!r} of format {name!r}: must be {group_size}")
    granularity = _granularity(weights)
    if name == "pack-quantized" and kind == "int" and num_bits in (4, 8) and (is_symmetric or granularity != TENSOR):
        return PackedIntFormat(num_bits, granularity, is_symmetric)
    is_float = kind == "float"
    # Integers of fewer bits are stored in whole bytes too.
    if name in _IN_BYTES and num_bits in ((8,) if is_float else range(2, 9)):
        dtypes = FP8_DTYPES if is_float else INT8_DTYPES
        label = f"{'fp8' if is_float else 'int8'}, {weights.get('strategy') or 'tensor'}"
        return ScaledFormat(label, dtypes, (granularity,), has_zero_point=not is_symmetric)
    symmetry = "symmetric" if is_symmetric else "asymmetric"
    raise UnsupportedFormatError(
        f"format {name!r} with {symmetry} {kind} weights of {num_bits} bits is not supported; supported: {_SUPPORTED}"
    )


def _granularity(weights: Mapping[str, Any]) -> Granularity:
    """Without a strategy the group size implies it, as in compressed-tensors."""
    group_size = weights.get("group_size")
    implied = "tensor" if group_size is None else "group" if group_size > 0 else "channel"
    strategy = weights.get("strategy") or implied
    if strategy == "tensor":
        return TENSOR
    if strategy == "channel":
        return CHANNEL
    if strategy == "group" and group_size is not None and int(group_size) > 0:
        return Granularity(1, int(group_size))
    if strategy == "block":
        num_rows, num_columns = (int(size) for size in weights["block_structure"])
        if min(num_rows, num_columns) > 0:
            return Granularity(num_rows, num_columns)
    raise UnsupportedFormatError(f"weight strategy {strategy!r} is not supported; supported: {_SUPPORTED}")
