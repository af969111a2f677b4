"""What tells modelling code of transformers apart from that of another version."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from services.worker.models.generic.build import read_class
from shared.model_files.model_dir import architectures_of


def identity_of(model_class: type[PreTrainedModel]) -> str:
    """transformers' version, and a digest of the file that defines the class."""
    source = Path(inspect.getfile(model_class)).read_bytes()
    return f"transformers-{transformers.__version__} {hashlib.sha256(source).hexdigest()[:16]}"


def identity_of_model(config: Mapping[str, Any]) -> str:
    """`identity_of` the class that the first architecture of config.json names; raises as `read_class`."""
    names = architectures_of(config)
    return identity_of(read_class(config, names[0] if names else "")[0])
