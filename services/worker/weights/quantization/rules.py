"""Rules that pick a layer's format by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.weights.quantization.layer_format import LayerFormat

# Of keys and values kept in eight bits, which our cache does not do.
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")


class UnsupportedFormatError(ValueError):
    """A checkpoint asks for a format that is not supported; the message says which ones are."""


@dataclass(frozen=True, slots=True)
class FormatRules:
    """The first rule whose predicate holds for a layer's name gives its format; None, and no rule: plain floats."""

    rules: tuple[tuple[Callable[[str], bool], LayerFormat | None], ...] = ()
    # Of tensors that stand in no layer we load and that nobody here needs.
    unused_suffixes: tuple[str, ...] = _CACHE_SCALES

    def format_of(self, layer: str) -> LayerFormat | None:
        """The format of the linear layer called `layer`; None for plain floats."""
        return next((layer_format for applies, layer_format in self.rules if applies(layer)), None)


def is_listed(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a layer's name starts with or ends in one of `patterns`, or matches it as an expression at its start.

    What stands at the start has to end at a dot or the name's end: `mlp.gate` is not `mlp.gate_proj`.

    Source: transformers 5.23, quantizers/quantizers_utils.py, `should_convert_module`.
    """
    starts = re.compile("|".join(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" for pattern in patterns))
    ends = tuple(patterns)
    return lambda layer: bool(ends) and (starts.match(layer) is not None or layer.endswith(ends))
