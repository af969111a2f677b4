"""Guesses at the one cause of many problems with a checkpoint's tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

# What comes before the number of a layer.
_LAYER = re.compile(r"(.*?)layers\.\d+\.")
# What quantised checkpoints store beside codes, or in place of weights.
_QUANTIZED_SUFFIXES = (
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale", ".activation_scale"),
    *(".weight_packed", ".qweight", ".qzeros", ".g_idx", ".absmax", "_blocks", "_scales"),
)


def names_hint(missing: AbstractSet[str], unread: AbstractSet[str]) -> str | None:
    """How stored names differ from expected ones, if most of those `missing` are stored with another prefix."""
    layers = {name: match[1] for name in missing if (match := _LAYER.match(name))}
    if not layers:
        return None
    [(expected, _)] = Counter(layers.values()).most_common(1)
    wanted = [name.removeprefix(expected) for name, prefix in layers.items() if prefix == expected]
    prefixes = {match[1] for name in unread if (match := _LAYER.match(name))}
    num_stored = {prefix: sum(prefix + name in unread for name in wanted) for prefix in sorted(prefixes)}
    stored = max(num_stored, key=lambda prefix: num_stored[prefix], default="")
    if not 2 * num_stored.get(stored, 0) > len(wanted):
        return None
    example = min(name for name in wanted if stored + name in unread)
    return (
        f"names differ by a prefix: {stored + example} is stored where {expected + example} is expected, so "
        f"{_difference(stored, expected)}; save the model itself, not what it is wrapped in, with transformers' "
        "save_pretrained"
    )


def format_hint(dtypes: Mapping[str, str]) -> str | None:
    """What tensors say about a format that config.json does not; `dtypes` are safetensors' names."""
    float8 = min((name for name, dtype in dtypes.items() if dtype.startswith("F8_")), default=None)
    scaled = min((name for name in dtypes if name.endswith(_QUANTIZED_SUFFIXES)), default=None)
    if float8 is None and scaled is None:
        return None
    what = f"in FP8 ({float8})" if float8 is not None else f"quantised ({scaled})"
    return (
        f"weights are stored {what}, but config.json has no quantization_config, which says how: take the config.json "
        "that was published with them"
    )


def _difference(stored: str, expected: str) -> str:
    if f".{stored}".endswith(f".{expected}"):
        return f"they have the prefix {stored.removesuffix(expected)!r} too many"
    if f".{expected}".endswith(f".{stored}") or not stored:
        return f"they lack the prefix {expected.removesuffix(stored)!r}"
    return f"they have the prefix {stored!r} instead of {expected!r}"
