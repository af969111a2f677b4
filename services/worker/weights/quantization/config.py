"""The format of each layer, from config.json's `quantization_config` or a quantiser's own file."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.worker.recorded_config import RecordedConfig, merged
from services.worker.weights.quantization.awq_gptq import awq_rules, gptq_rules
from services.worker.weights.quantization.compressed_tensors import compressed_tensors_rules
from services.worker.weights.quantization.fp8 import fbgemm_fp8_rules, fp8_rules
from services.worker.weights.quantization.gguf_blocks import METHOD as GGUF_METHOD
from services.worker.weights.quantization.gguf_blocks import gguf_rules
from services.worker.weights.quantization.keys import unknown_keys
from services.worker.weights.quantization.layer_format import LayerFormat, PlainFormat
from services.worker.weights.quantization.modelopt import modelopt_rules
from services.worker.weights.quantization.mxfp4 import Mxfp4StackFormat
from services.worker.weights.quantization.quark import quark_rules
from services.worker.weights.quantization.rules import FormatRules, UnsupportedFormatError
from shared.model_files.model_dir import (
    CONFIG,
    HF_QUANT_CONFIG,
    QUANT_CONFIG,
    QUANTIZE_CONFIG,
    ModelDirectoryError,
    is_multimodal,
    read_json,
)
from shared.model_files.text_models import spellings

MXFP4 = "mxfp4"
STACKS = "stacks"
"""The key of the method of stacks of experts, where it is another than that of all other layers."""

_METHODS: dict[str, Callable[[Mapping[str, Any]], FormatRules]] = {
    "awq": awq_rules,
    "compressed-tensors": compressed_tensors_rules,
    "fbgemm_fp8": fbgemm_fp8_rules,
    "fp8": fp8_rules,
    GGUF_METHOD: gguf_rules,
    "gptq": gptq_rules,
    "modelopt": modelopt_rules,
    "modelopt_fp4": modelopt_rules,
    # Only stacks of experts are packed, and their tensor names show it. The modules listed are all others.
    MXFP4: lambda _: FormatRules(),
    "quark": quark_rules,
}

# Where quantisers write the configuration if not into config.json, and which method's it is.
_FILES = {HF_QUANT_CONFIG: "modelopt", QUANTIZE_CONFIG: "gptq", QUANT_CONFIG: "awq"}
_KEYS = ("quantization_config", "compression_config")

PLAIN = PlainFormat()
_PLAIN_STACKS = {is_transposed: PlainFormat(suffix="", is_transposed=is_transposed) for is_transposed in (False, True)}
_MXFP4_STACK = Mxfp4StackFormat()


class QuantizationConfig:
    """The formats of a checkpoint's layers."""

    def __init__(
        self,
        rules: FormatRules | None = None,
        *,
        has_mxfp4: bool = False,
        file: str = CONFIG,
        unknown_keys: tuple[str, ...] = (),
        spellings: Callable[[str], tuple[str, ...]] = lambda name: (name,),
    ) -> None:
        """Take the rules.

        Args:
            rules: None means that nothing is quantised.
            has_mxfp4: Whether stacks of experts are packed.
            file: Where the configuration was.
            unknown_keys: See the attribute.
            spellings: The names by which rules may know a layer.
        """
        self._spellings = spellings
        self._rules = rules or FormatRules()
        self._has_mxfp4 = has_mxfp4
        self.is_quantized = bool(self._rules.rules) or has_mxfp4
        """Whether any layer may be."""
        self.unused_suffixes = self._rules.unused_suffixes
        self.file = file
        self.unknown_keys = unknown_keys
        """The keys in `file` that were not read, and of which nothing is known, sorted; paths with dots."""

    @classmethod
    def read(cls, model_dir: Path, config: Mapping[str, Any]) -> QuantizationConfig:
        """Read `config`, or else a quantiser's own file beside it.

        Raises:
            ModelDirectoryError: as `from_json`, or the file is malformed.
        """
        name = next((name for name in _FILES if (model_dir / name).exists()), None)
        if name is None or any(config.get(key) for key in _KEYS):
            return cls.from_json(config)
        values = {"quant_method": _FILES[name], **read_json(model_dir, name)}
        # A chain writes to its first map alone.
        return cls.from_json(ChainMap({_KEYS[0]: values}, config), name)  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, config: Mapping[str, Any], file: str = CONFIG) -> QuantizationConfig:
        """Read config.json; `file` has the configuration of the quantisation, for errors.

        Raises:
            ModelDirectoryError: a method, format or scheme is malformed or not supported; the message says which are.
        """
        place = next((key for key in _KEYS if config.get(key)), None)
        if place is None:
            return cls()
        values = merged(config[place]) if isinstance(config[place], Mapping) else RecordedConfig({})
        method = values.get("quant_method")
        if not isinstance(method, str) or method not in _METHODS:
            supported = ", ".join(sorted(_METHODS))
            raise ModelDirectoryError(f"{file}: quant_method {method!r} is not supported; supported: {supported}")
        try:
            rules = _METHODS[method](values)
        except (re.error, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            text = str(error) if isinstance(error, UnsupportedFormatError) else repr(error)
            raise ModelDirectoryError(f"{file}: quantization_config of method {method!r}: {text}") from error
        is_text = is_multimodal(config)
        has_mxfp4 = MXFP4 in (method, values.get(STACKS) if method == GGUF_METHOD else None)
        prefix = f"{place}." if file == CONFIG else ""
        unknown = tuple(prefix + path for path in unknown_keys(method, list(values.unread())))
        return cls(
            rules,
            has_mxfp4=has_mxfp4,
            file=file,
            unknown_keys=unknown,
            **({"spellings": spellings} if is_text else {}),
        )

    def linear_format(self, layer: str) -> LayerFormat:
        """The format of a linear layer."""
        return self._rules.format_of(*self._spellings(layer)) or PLAIN

    def stack_format(self, *, is_plain: bool, is_transposed: bool = True) -> LayerFormat:
        """The format of a stack of experts.

        Args:
            is_plain: Whether a tensor of the stack's own name is stored.
            is_transposed: Whether its matrices are [in_features, out_features].
        """
        return _MXFP4_STACK if self._has_mxfp4 and not is_plain else _PLAIN_STACKS[is_transposed]
