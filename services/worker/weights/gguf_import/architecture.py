"""How an architecture of GGUF files is described; the descriptions are in `architectures`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.worker.weights.gguf_import.gguf_file import GgufTensor
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.tensors import Rule, Sizes, Tensor

Rules = tuple[Rule, ...]
Config = dict[str, Any]


OUTPUT_NORM = Tensor("output_norm.weight", "model.norm.weight", "hidden")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of GGUF's, and the kind of its value."""

    name: str
    kind: str = "size"
    """A method of `Metadata`."""
    default: Any = None
    """What the model has if the file lacks the key; None means that the file must have it."""

    def read(self, metadata: Metadata) -> Any:
        """Read the value; see `Metadata`."""
        return getattr(metadata, self.kind)(self.name, default=self.default)


def plain_widths(metadata: Metadata, config: Config) -> int:
    """Heads that are rotated whole, and as wide for values as for keys.

    Raises:
        UnsupportedGgufError: they are others.
    """
    head_dim = head_width(metadata, config)
    if (rotated := metadata.size("rope.dimension_count", default=head_dim)) != head_dim:
        raise UnsupportedGgufError(
            f"has rope.dimension_count {rotated}, but only whole heads, of {head_dim}, are supported"
        )
    config["head_dim"] = head_dim
    return head_dim


def head_width(metadata: Metadata, config: Config) -> int:
    """The columns of a head.

    Raises:
        UnsupportedGgufError: values have others than keys.
    """
    default = max(config["hidden_size"] // config["num_attention_heads"], 1)
    head_dim = metadata.size("attention.key_length", default=default)
    if (width := metadata.size("attention.value_length", default=head_dim)) != head_dim:
        raise UnsupportedGgufError(f"has attention.value_length {width}, not that of keys, {head_dim}")
    return head_dim


def partly_rotated(metadata: Metadata, config: Config) -> int:
    """Heads of which the first columns are rotated, and which are as wide for values as for keys.

    Raises:
        UnsupportedGgufError: they are others.
    """
    config["head_dim"] = head_dim = head_width(metadata, config)
    rotary_dim = metadata.size("rope.dimension_count", default=head_dim)
    config["partial_rotary_factor"] = rotary_dim / head_dim
    return rotary_dim


def plain_sizes(config: Config) -> Sizes:
    """The sizes that rules name."""
    heads, key_value_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "heads": heads,
        "key_value_heads": key_value_heads,
        "head": head,
        "query": heads * head,
        "key_value": key_value_heads * head,
    }


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is read."""

    name: str
    """transformers' class."""
    model_type: str
    """config.json's."""
    rules: Callable[[Config, int, frozenset[str]], Rules]
    """The rules of a layer, by its number and the names of the tensors that the file has for it."""
    keys: Mapping[str, Key]
    """GGUF's keys, by config.json's."""
    values: Mapping[str, Any]
    """What config.json says of every such model, because GGUF has no key for it."""
    widths: Callable[[Metadata, Config], int] = plain_widths
    """Adds the sizes of heads to the configuration, and returns how many of a head's columns are rotated."""
    extend: Callable[[Metadata, Config, Collection[str]], None] = lambda _metadata, _config, _names: None
    """Completes the configuration where that takes more than a key; given the names of the file's tensors, too."""
    arrange: Callable[[Config, Mapping[str, GgufTensor]], None] = lambda _config, _tensors: None
    """Completes the configuration by what keeps its format; given the file's tensors."""
    sizes: Callable[[Config], Sizes] = plain_sizes
    """The sizes that rules name."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Names in config.json of what a model has if its layers have a tensor."""
    norm: Rule = OUTPUT_NORM
    draft_prefix: str = ""
    """How names of the tensors of a layer that drafts begin, if not as those of other layers do."""


def alike(*rules: Rule) -> Callable[[Config, int, frozenset[str]], Rules]:
    """The rules of layers that are all alike."""
    return lambda _config, _layer, _names: rules
