"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.worker.models.llama import LlamaForCausalLM
from services.worker.models.protocol import CausalLM
from services.worker.ops import Ops
from services.worker.weights import ModelWeights
from shared.model_dir import ModelDirectoryError

__all__ = ["CausalLM", "ModelLoader", "loader_for"]

# Builds a model from config.json, its weights and a backend.
ModelLoader = Callable[[Mapping[str, Any], ModelWeights, Ops], CausalLM]

_ARCHITECTURES: dict[str, ModelLoader] = {"LlamaForCausalLM": LlamaForCausalLM.load}


def loader_for(config: Mapping[str, Any]) -> ModelLoader:
    """The loader of the architecture that `config` (config.json) names.

    Raises:
        ModelDirectoryError: it names none that is known here, or its weights are quantised.
    """
    if config.get("quantization_config"):
        raise ModelDirectoryError("config.json: quantised weights are not supported")
    names = config.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    known = ", ".join(sorted(_ARCHITECTURES))
    raise ModelDirectoryError(f"config.json: architectures is {names}; supported: {known}")
