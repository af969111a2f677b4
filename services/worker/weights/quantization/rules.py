"""Selects a layer's format by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.weights.quantization.layer_format import LayerFormat

# Scales of 8-bit attention. Those of keys and values are read if the KV cache is in FP8.
_CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_scale",
    ".prob_output_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)


class UnsupportedFormatError(ValueError):
    """A checkpoint uses an unsupported format; the message says which ones are supported."""


@dataclass(frozen=True, slots=True)
class FormatRules:
    """The first rule whose predicate accepts one of a layer's names gives its format.

    A format of None means plain floats, as for a name that no rule accepts.
    """

    rules: tuple[tuple[Callable[[str], bool], LayerFormat | None], ...] = ()
    unused_suffixes: tuple[str, ...] = _CACHE_SCALES
    """Suffixes of tensors that no layer loaded here needs."""

    def format_of(self, *names: str) -> LayerFormat | None:
        """The format of the layer with these names; None means plain floats."""
        return next((layer_format for applies, layer_format in self.rules if any(map(applies, names))), None)


def is_listed(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a layer's name ends with one of `patterns`, or starts with it as a regular expression.

    A match at the start must end at a dot or the end of the name: `mlp.gate` does not match `mlp.gate_proj`.

    Source: transformers 5.23, quantizers/quantizers_utils.py, `should_convert_module`.

    Raises:
        ValueError: a pattern is not a string.
    """
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{list(patterns)!r} are not names of layers")
    starts = re.compile("|".join(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" for pattern in patterns))
    ends = tuple(patterns)
    return lambda layer: bool(ends) and (starts.match(layer) is not None or layer.endswith(ends))
