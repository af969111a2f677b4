"""`quant_method` modelopt: FP8 and NVFP4, as NVIDIA's quantiser writes them.

Source: ModelOpt 0.47, torch/export/convert_hf_config.py (both forms of the configuration) and quant_utils.py,
`process_layer_quant_config` (formats by layer), `_prefix_wildcard_summarize_exclude_modules` (names).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.weights.quantization.layer_format import LayerFormat
from services.worker.weights.quantization.nvfp4 import NVFP4_GROUP_SIZE, Nvfp4Format
from services.worker.weights.quantization.rules import FormatRules, Rule, UnsupportedFormatError, is_in_globs
from services.worker.weights.quantization.scaled import CHANNEL, TENSOR, ScaledFormat

_DTYPES = ("F8_E4M3",)
_NVFP4 = Nvfp4Format(".weight", ".weight_scale_2", is_divisor=False)
_FORMATS: dict[str, LayerFormat] = {
    "FP8": ScaledFormat("modelopt, fp8", _DTYPES, (TENSOR,)),
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledFormat("modelopt, fp8", _DTYPES, (CHANNEL,)),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
_MIXED = "MIXED_PRECISION"


def modelopt_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse the `quantization_config`, or what hf_quant_config.json says.

    Raises:
        UnsupportedFormatError: there is no such algorithm here.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    details = values.get("quantization", values)
    # Only hf_quant_config.json has the second name.
    excluded = details.get("ignore") or details.get("exclude_modules") or []
    # Older releases list a module without the `.*` for what is inside.
    within = [f"{pattern}.*" for pattern in excluded if isinstance(pattern, str)]
    rules: list[Rule] = [(is_in_globs([*excluded, *within]), None)]
    if str(details["quant_algo"]).upper() != _MIXED:
        return FormatRules((*rules, (lambda _: True, _format(details))))
    layers = details["quantized_layers"].items()
    return FormatRules((*rules, *((is_in_globs([layer]), _format(each)) for layer, each in layers)))


def _format(details: Mapping[str, Any]) -> LayerFormat:
    name = str(details["quant_algo"]).upper()
    if name not in _FORMATS:
        supported = ", ".join([*_FORMATS, _MIXED])
        raise UnsupportedFormatError(f"quant_algo {name!r} is not supported; supported: {supported}")
    group_size = details.get("group_size") or NVFP4_GROUP_SIZE
    if _FORMATS[name] is _NVFP4 and group_size != NVFP4_GROUP_SIZE:
        raise UnsupportedFormatError(f"group_size {group_size!r} of {name}: must be {NVFP4_GROUP_SIZE}")
    return _FORMATS[name]
