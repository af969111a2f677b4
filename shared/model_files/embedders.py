"""Which models make vectors of texts: decoders, published as base classes without a head, or with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from shared.model_files.model_dir import ARCHITECTURES, CONFIG, ModelDirectoryError, architectures_of

Task = Literal["generate", "embed"]

TASK_DESCRIPTION = (
    "What the model is served for: generate is text and scores; embed is vectors of texts, by the recipe in the files "
    "of sentence-transformers that the directory must have, and weights are then quantised only if --quantization says "
    "so."
)

_OTHERS = "use sentence-transformers or text-embeddings-inference for it"
_PREFIX = "model."
# Heads are no part of what makes a vector.
HEADS = ("lm_head.", "model.lm_head.")
_SUFFIXES = ("TextModel", "Model")
_ENCODER = re.compile(
    "bert|electra|mpnet|^nomic|^new|^gte|^u?mt5|^t5|^xlm|^clip|^siglip|encoder|bidirectional", re.IGNORECASE
)
_CLASSIFIER = re.compile(r"For(Sequence|Token|Image|Audio)?(Classification|RewardModel|Regression)")
# What makes tokens attend to later ones, by its value.
_BIDIRECTIONAL = {"is_causal": False, "use_bidirectional_attention": True, "bidirectional_attention": True}


def served_config(config: Mapping[str, Any], task: Task) -> Mapping[str, Any]:
    """The configuration as the loader of the architecture reads it.

    Args:
        config: What `read_config` returns.
        task: What the model is served for.

    Raises:
        ModelDirectoryError: it is no decoder, or a base class that is to generate; the message says what to use.
    """
    names = architectures_of(config)
    name = names[0] if names else ""
    is_base = _causal_name(name) is not None
    if task == "generate":
        if is_base:
            raise ModelDirectoryError(f"{CONFIG}: {name} has no head and makes vectors: serve it with --task embed")
        return config
    _check_decoder(config, name)
    if not is_base and name not in ARCHITECTURES:
        raise ModelDirectoryError(
            f"{CONFIG}: architectures is {names}, which makes no vectors here; those that do, and their base classes: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return as_causal(config)


def as_causal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the architecture of the whole model in the place of its base class."""
    causal = _causal_name(next(iter(architectures_of(config)), ""))
    return config if causal is None else {**config, "architectures": [causal]}


def headless_name(stored: str) -> str:
    """What the model calls a stored tensor, which base classes store without the prefix of a whole model."""
    return stored if stored.startswith((_PREFIX, *HEADS)) else _PREFIX + stored


def _causal_name(name: str) -> str | None:
    """The architecture whose base class `name` is; None if it is none."""
    for suffix in _SUFFIXES:
        causal = f"{name.removesuffix(suffix)}ForCausalLM"
        if name.endswith(suffix) and causal in ARCHITECTURES:
            return causal
    return None


def _check_decoder(config: Mapping[str, Any], name: str) -> None:
    if _CLASSIFIER.search(name):
        raise ModelDirectoryError(
            f"{CONFIG}: {name} is a classifier, whose own head gives a score and no vector: {_OTHERS}; a reranker that "
            "answers yes or no is served without --task embed"
        )
    if _ENCODER.search(name) or config.get("is_encoder_decoder"):
        raise ModelDirectoryError(
            f"{CONFIG}: {name} is an encoder, whose tokens attend to later ones, but only decoders are served: "
            f"{_OTHERS}"
        )
    for key, value in _BIDIRECTIONAL.items():
        if config.get(key) is value:
            raise ModelDirectoryError(
                f"{CONFIG}: {key} is {str(value).lower()}, so that the tokens of {name or 'the model'} attend to later "
                f"ones, but only decoders are served: {_OTHERS}"
            )
