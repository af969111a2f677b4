"""The notes of a release, out of the changelog: `python -m tests.support.release.notes VERSION`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_CHANGELOG = Path(__file__).parents[3] / "CHANGELOG.md"


def notes_of(version: str, changelog: str) -> str:
    """The section of a version, without its heading `## [VERSION] - YYYY-MM-DD`.

    Raises:
        ValueError: there is no such section, it has no date, or it is empty.
    """
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    found = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`")
    if not found[1].strip():
        raise ValueError(f"CHANGELOG.md says nothing about {version}")
    return f"{found[1].strip()}\n"


if __name__ == "__main__":
    sys.stdout.write(notes_of(sys.argv[1], _CHANGELOG.read_text(encoding="utf-8")))
