"""Selects a layer's format by its name."""

from __future__ import annotations

import fnmatch
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


Rule = tuple[Callable[[str], bool], LayerFormat | None]
"""Whether a layer of this name has the format; None means plain floats."""


class UnsupportedFormatError(ValueError):
    """A checkpoint uses an unsupported format; the message says which ones are supported."""


@dataclass(frozen=True, slots=True)
class FormatRules:
    """The first rule whose predicate accepts one of a layer's names gives its format.

    A format of None means plain floats, as for a name that no rule accepts.
    """

    rules: tuple[Rule, ...] = ()
    unused_suffixes: tuple[str, ...] = _CACHE_SCALES
    """Suffixes of tensors that no layer loaded here needs."""

    def format_of(self, *names: str) -> LayerFormat | None:
        """The format of the layer with these names; None means plain floats."""
        return next((layer_format for applies, layer_format in self.rules if any(map(applies, names))), None)


def matches_expression(pattern: str) -> Callable[[str], bool]:
    """Whether a layer's name starts with a match of a regular expression."""
    expression = re.compile(pattern)
    return lambda layer: expression.match(layer) is not None


def is_in_globs(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a layer's whole name is one of `patterns`, in which `*`, `?` and `[…]` are as in a shell.

    A pattern that starts with `re:` is a regular expression, for the start of the name.

    Raises:
        ValueError: a pattern is not a string.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{patterns!r} are not names of layers")
    expressions = [pattern.removeprefix("re:") for pattern in patterns if pattern.startswith("re:")]
    expressions += [fnmatch.translate(pattern) for pattern in patterns if not pattern.startswith("re:")]
    matches = [matches_expression(expression) for expression in expressions]
    return lambda layer: any(each(layer) for each in matches)


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
