"""ORG/NAME[@REVISION]: how a model of a hub is named on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@\s]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model of a hub."""

    repository: str
    """ORG/NAME."""
    revision: str | None = None
    """A branch, a tag or a commit; the hub's default branch if None."""

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_model_name(text: str) -> ModelName | None:
    """None if it cannot be the name of a model."""
    match = _NAME.fullmatch(text)
    return None if match is None else ModelName(match[1], match[2])


def parse_model(model: Path) -> ModelName | None:
    """The same for an argument that may also be a directory; None if it is one, or a path of another form."""
    return None if model.exists() else parse_model_name(str(model))
