"""How a model of a hub is named on the command line: ORG/NAME[@REVISION], or a GGUF file of it.

A file is ORG/NAME[@REVISION]/FILE.gguf, or ORG/NAME[@REVISION]:KIND with the kind in its name, as Q4_K_M.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@\s]+))?", re.ASCII)
_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@\s:/]+))?(?::(\w[\w-]*)|/(\w[\w./-]*\.gguf))", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model of a hub."""

    repository: str
    """ORG/NAME."""
    revision: str | None = None
    """A branch, a tag or a commit; the hub's default branch if None."""

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class GgufName:
    """A GGUF file of a model of a hub."""

    model: ModelName
    file: str | None
    """Its name, in the model's repository."""
    kind: str | None
    """What is no whole name is a part of it."""

    def __str__(self) -> str:
        return f"{self.model}/{self.file}" if self.kind is None else f"{self.model}:{self.kind}"


def parse_model_name(text: str) -> ModelName | None:
    """None if it cannot be the name of a model."""
    match = _NAME.fullmatch(text)
    return None if match is None else ModelName(match[1], match[2])


def parse_model(model: Path) -> ModelName | None:
    """The same for an argument that may also be a directory; None if it is one, or a path of another form."""
    return None if model.exists() else parse_model_name(str(model))


def parse_gguf(model: Path) -> GgufName | None:
    """None if an argument is a path that exists, or cannot be the name of a GGUF file of a hub."""
    match = None if model.exists() else _GGUF.fullmatch(str(model))
    return None if match is None else GgufName(ModelName(match[1], match[2]), match[4], match[3])
