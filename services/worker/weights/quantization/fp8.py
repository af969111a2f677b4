"""`quant_method` fp8 (DeepSeek's blocks, or vLLM's scale per tensor or channel) and fbgemm_fp8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.weights.quantization.rules import FormatRules, UnsupportedFormatError, is_listed
from services.worker.weights.quantization.scaled import CHANNEL, FP8_DTYPES, TENSOR, Granularity, ScaledFormat

# Despite its name DeepSeek's `weight_scale_inv` also multiplies the stored weight.
_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale")


def fp8_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse `quant_method` fp8.

    Raises:
        UnsupportedFormatError: experts are in another format.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    if values.get("expert_dtype", "fp8") not in (None, "fp8"):
        raise UnsupportedFormatError(f"expert_dtype {values['expert_dtype']!r} is not supported; supported: fp8")
    block = values.get("weight_block_size")
    if block is None:
        return _rules(values, ScaledFormat("fp8", FP8_DTYPES, (TENSOR, CHANNEL), _SCALE_SUFFIXES))
    num_rows, num_columns = (int(size) for size in block)
    if min(num_rows, num_columns) < 1:
        raise ValueError(f"weight_block_size is {block}")
    label = f"fp8, blocks of {num_rows}x{num_columns}"
    granularity = Granularity(num_rows, num_columns)
    return _rules(values, ScaledFormat(label, FP8_DTYPES, (granularity,), _SCALE_SUFFIXES))


def fbgemm_fp8_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse `quant_method` fbgemm_fp8: a scale per output channel."""
    return _rules(values, ScaledFormat("fp8", FP8_DTYPES, (CHANNEL,)))


def _rules(values: Mapping[str, Any], layer_format: ScaledFormat) -> FormatRules:
    skipped = values.get("modules_to_not_convert") or values.get("ignored_layers") or []
    return FormatRules(((is_listed(list(skipped)), None), (lambda _: True, layer_format)))
