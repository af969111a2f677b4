"""Mistral Small 3 and Ministral 3 with images, of which the text is served: a Mistral or a Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.llama import load_mistral
from services.worker.models.ministral3 import load_ministral3
from services.worker.models.parts.decoder import DecoderModel


def load_mistral3(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    return (load_ministral3 if config["model_type"] == "ministral3" else load_mistral)(config, shard)
