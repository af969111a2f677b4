"""`quant_method` quark: FP8, MXFP4 and integers, as AMD's quantiser writes them.

Activations are not quantised as the configuration says; the scales of a KV cache are read if that is in FP8.

Source: Quark 0.13, torch/quantization/config/config.py (fields), torch/quantization/model_transformation.py,
`setup_config_per_layer` (which configuration a layer has), and torch/utils/pack.py (what is stored).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.weights.quantization.layer_format import LayerFormat
from services.worker.weights.quantization.mxfp4 import Mxfp4Format
from services.worker.weights.quantization.rules import FormatRules, Rule, UnsupportedFormatError, is_in_globs
from services.worker.weights.quantization.scaled import (
    CHANNEL,
    FP8_DTYPES,
    INT8_DTYPES,
    TENSOR,
    Granularity,
    ScaledFormat,
)
from services.worker.weights.quantization.transposed_int import AWQ_ORDER, TransposedIntFormat, WordLayout

_CLASS = "Linear"
_ORDERS = {"reorder": AWQ_ORDER, "order": None}
_SUFFIXES = (".weight", ".weight_zero_point", ".weight_scale")
_FP8 = ("fp8_e4m3", "fp8_e5m2")
_INT4 = ("int4", "uint4")
_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_SUPPORTED = (
    "fp8_e4m3 and fp8_e5m2 per_tensor, per_channel, per_group and per_block, int8 per_tensor and per_channel, int4 and "
    "uint4 per_group, fp4 per_group of 32 with scale_format e8m0"
)


def quark_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse the `quantization_config`.

    Raises:
        UnsupportedFormatError: weights are stored as floats or in an unsupported format, or activations are rotated.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    _refuse_rotations(values.get("algo_config") or [])
    export = values["export"]
    if export["weight_format"] != "real_quantized":
        raise UnsupportedFormatError(
            f"weight_format {export['weight_format']!r} is not supported; supported: real_quantized"
        )
    pack_method = export["pack_method"]
    if pack_method not in _ORDERS:
        raise UnsupportedFormatError(f"pack_method {pack_method!r} is not supported; supported: {', '.join(_ORDERS)}")
    order = _ORDERS[pack_method]
    layers = [(name, _layer_format(each, order)) for name, each in (values.get("layer_quant_config") or {}).items()]
    # A layer's own name comes before patterns; otherwise the first one counts.
    layers.sort(key=lambda layer: "*" in layer[0])
    rules: list[Rule] = [(is_in_globs(values.get("exclude") or []), None)]
    rules += [(is_in_globs([name]), layer_format) for name, layer_format in layers]
    classes = values.get("layer_type_quant_config") or {}
    default = classes[_CLASS] if _CLASS in classes else values["global_quant_config"]
    return FormatRules((*rules, (lambda _: True, _layer_format(default, order))))


def _refuse_rotations(algorithms: Any) -> None:
    """Raise if activations must be rotated at run time."""
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        online = [name for name in ("online_r1_rotation", "r3", "r4") if each.get(name)]
        if str(each.get("name")) in ("rotation", "quarot") and online:
            raise UnsupportedFormatError(f"{online[0]} of algorithm {each['name']!r} is not supported")


def _layer_format(layer: Mapping[str, Any], order: tuple[int, ...] | None) -> LayerFormat | None:
    if layer.get("bias"):
        raise UnsupportedFormatError("quantised biases are not supported")
    weight = layer.get("weight")
    if not weight:
        return None
    if isinstance(weight, list):
        if len(weight) > 1:
            raise UnsupportedFormatError(
                f"weights quantised in {len(weight)} stages are not supported; supported: {_SUPPORTED}"
            )
        (weight,) = weight
    layer_format = None if weight.get("is_dynamic") else _weight_format(weight, order)
    if layer_format is None:
        described = ", ".join(
            f"{key} {weight.get(key)!r}" for key in ("dtype", "qscheme", "group_size", "scale_format")
        )
        raise UnsupportedFormatError(f"weights with {described} are not supported; supported: {_SUPPORTED}")
    return layer_format


def _weight_format(weight: Mapping[str, Any], order: tuple[int, ...] | None) -> LayerFormat | None:
    """None if it is not supported."""
    dtype, is_symmetric = weight["dtype"], weight.get("symmetric") is not False
    granularity = _granularity(weight)
    if all(weight.get(key) == value for key, value in _MXFP4.items()):
        return Mxfp4Format(".weight")
    if dtype in _FP8 and granularity is not None:
        return ScaledFormat(f"quark, {dtype}", FP8_DTYPES, (granularity,))
    if dtype == "int8" and granularity in (TENSOR, CHANNEL):
        return ScaledFormat(
            "quark, int8",
            INT8_DTYPES,
            (granularity,),
            has_zero_point=True,
            may_lack_zero_point=is_symmetric,
        )
    if dtype in _INT4 and weight["qscheme"] == "per_group" and granularity is not None:
        if weight.get("zero_point_type") not in (None, "int32"):
            return None
        layout = WordLayout(_SUFFIXES, order=order, is_signed=dtype == "int4")
        # Without zero points unsigned codes would have no sign.
        may_lack = is_symmetric and layout.is_signed
        return TransposedIntFormat(f"quark, {dtype}", layout, 4, granularity.columns, is_symmetric=may_lack)
    return None


def _granularity(weight: Mapping[str, Any]) -> Granularity | None:
    """None if it is not supported."""
    scheme, axis = weight["qscheme"], weight.get("ch_axis")
    if scheme == "per_tensor":
        return TENSOR
    if scheme == "per_channel" and axis in (0, None):
        return CHANNEL
    if scheme == "per_group" and axis in (1, -1):
        return _blocks(1, int(weight["group_size"]))
    if scheme == "per_block":
        num_rows, num_columns = (int(size) for size in weight["block_size"])
        return _blocks(num_rows, num_columns)
    return None


def _blocks(num_rows: int, num_columns: int) -> Granularity:
    if min(num_rows, num_columns) < 1:
        raise ValueError(f"groups of {num_rows} by {num_columns} weights")
    return Granularity(num_rows, num_columns)
