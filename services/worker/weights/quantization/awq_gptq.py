"""`quant_method` awq and gptq: how the layers of a checkpoint are packed, and which ones are.

Sources: AutoAWQ 0.2, models/_config.py and utils/module.py, `exclude_layers_to_not_quantize`; GPTQModel 4,
quantization/config.py (fields, `dynamic_get`); transformers 5.23, utils/quantization_config.py, `GPTQConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.worker.recorded_config import merged
from services.worker.weights.quantization.layer_format import LayerFormat
from services.worker.weights.quantization.rules import FormatRules, Rule, UnsupportedFormatError, matches_expression
from services.worker.weights.quantization.transposed_int import AWQ_ORDER, TransposedIntFormat, WordLayout

_SUFFIXES = (".qweight", ".qzeros", ".scales")
_AWQ = WordLayout(_SUFFIXES, order=AWQ_ORDER)
_GPTQ = {
    "gptq": WordLayout(_SUFFIXES, has_input_words=True, zero_shift=1),
    "gptq_v2": WordLayout(_SUFFIXES, has_input_words=True),
}
_HEAD = "lm_head"


def awq_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse `quant_method` awq.

    Raises:
        UnsupportedFormatError: the version is not gemm, there are no zero points, or weights have other than 4 bits.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    version = _name(values, "version", "checkpoint_format", "format", default="gemm")
    if version != "gemm":
        raise UnsupportedFormatError(f"version {version!r} is not supported; supported: gemm")
    if not values.get("zero_point", True):
        raise UnsupportedFormatError("zero_point false is not supported; supported: true")
    skipped = _flat(values.get("modules_to_not_convert") or [])
    is_skipped: Rule = (lambda layer: any(part in layer for part in skipped), None)
    return FormatRules((is_skipped, *_dynamic_rules(values, _awq_format), (lambda _: True, _awq_format(values))))


def gptq_rules(values: Mapping[str, Any]) -> FormatRules:
    """Parse `quant_method` gptq.

    Raises:
        UnsupportedFormatError: weights have other than 4 or 8 bits, or are laid out for one kind of kernel.
        KeyError, TypeError, ValueError: the configuration is malformed.
    """
    rules = _dynamic_rules(values, _gptq_format)
    if not values.get(_HEAD, False):
        rules.append((lambda layer: layer == _HEAD, None))
    in_blocks = _flat(values.get("modules_in_block_to_quantize") or [])
    if in_blocks:
        ends = tuple(f".{name}" for name in in_blocks)
        rules.append((lambda layer: not f".{layer}".endswith(ends) and layer != _HEAD, None))
    return FormatRules((*rules, (lambda _: True, _gptq_format(values))))


def _awq_format(values: Mapping[str, Any]) -> LayerFormat:
    num_bits = int(values["bits"] if "bits" in values else values["w_bit"])
    if num_bits != 4:
        raise UnsupportedFormatError(f"{num_bits} bits are not supported; supported: 4")
    return TransposedIntFormat("awq, int4", _AWQ, num_bits, _group_size(values))


def _gptq_format(values: Mapping[str, Any]) -> LayerFormat:
    name = _name(values, "checkpoint_format", "format", default="gptq")
    if name not in _GPTQ:
        raise UnsupportedFormatError(f"checkpoint_format {name!r} is not supported; supported: {', '.join(_GPTQ)}")
    if values.get("is_marlin_format"):
        raise UnsupportedFormatError("is_marlin_format true is not supported; supported: false")
    num_bits = int(values["bits"])
    if num_bits not in (4, 8):
        raise UnsupportedFormatError(f"{num_bits} bits are not supported; supported: 4, 8")
    return TransposedIntFormat(
        f"gptq, int{num_bits}",
        _GPTQ[name],
        num_bits,
        _group_size(values),
        is_symmetric=bool(values.get("sym", True)),
        has_group_index=bool(values.get("desc_act", False)),
    )


def _dynamic_rules(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], LayerFormat]) -> list[Rule]:
    """GPTQModel's exceptions: expressions of names, each with what differs; one with `-:` is of plain layers."""
    rules: list[Rule] = []
    for pattern, changes in (values.get("dynamic") or {}).items():
        layer_format = None if pattern.startswith("-:") else make(merged(values, changes or {}))
        rules.append((matches_expression(pattern.removeprefix("-:").removeprefix("+:")), layer_format))
    return rules


def _group_size(values: Mapping[str, Any]) -> int | None:
    size = int(values["group_size"] if "group_size" in values else values["q_group_size"])
    if size != -1 and size < 1:
        raise ValueError(f"group_size is {size}")
    return None if size == -1 else size


def _name(values: Mapping[str, Any], *keys: str, default: str) -> str:
    return str(next((values[key] for key in keys if values.get(key) is not None), default)).lower()


def _flat(names: Any) -> list[str]:
    """Names in a list, or in lists of those that are quantised together."""
    flat = [name for each in names for name in (each if isinstance(each, list) else [each])]
    if isinstance(names, str) or not all(isinstance(name, str) for name in flat):
        raise ValueError(f"{names!r} are not names of layers")
    return flat
