"""What must hold before a release is published: `python -m tests.support.release.check TAG`.

It needs the standard library alone. Its output, `version=X.Y.Z`, is that of a workflow's step.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.release.notes import notes_of

_ROOT = Path(__file__).parents[3]
_TAG = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_DIGEST = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
_BASES = ("PYTHON_BASE", "ROCM_BASE")
VARIABLES = ("REGISTRY", "REGISTRY_PATH", "PYPI_UPLOAD_URL", "TORCH_ARGS", *_BASES)
"""Variables of the repository without which a release would end halfway."""


def find_faults(tag: str, root: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Why nothing can be released, in words; nothing where it can.

    Args:
        tag: The tag that is to be released.
        root: A checkout.
        variables: The repository's variables; one that is not set may be empty.
    """
    if not _TAG.fullmatch(tag):
        yield f"the tag {tag} has not the form vX.Y.Z"
    version = tag.removeprefix("v")
    for project in ("pyproject.toml", "protos/pyproject.toml"):
        found = tomllib.loads((root / project).read_text(encoding="utf-8"))["project"]["version"]
        if found != version:
            yield f"{project} has the version {found}, not {version}"
    try:
        notes_of(version, (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    except ValueError as error:
        yield str(error)
    for name in VARIABLES:
        if not variables.get(name):
            yield f"the repository's variable {name} is not set"
        elif name in _BASES and not _DIGEST.fullmatch(variables[name]):
            yield f"the repository's variable {name} does not name an image by its digest"


def main() -> None:
    """Check the tag that the command line names."""
    tag = sys.argv[1]
    if faults := list(find_faults(tag, _ROOT, os.environ)):
        sys.exit("\n".join(faults))
    sys.stdout.write(f"version={tag.removeprefix('v')}\n")


if __name__ == "__main__":
    main()
