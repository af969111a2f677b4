"""The documents name files and sections that there are."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system.processes import ROOT

pytestmark = pytest.mark.process

_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")
_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:cc|h|md|proto|py|yaml))`")
_HEADING = re.compile(r"(?m)^#+ +(.+?)\s*$")
_FENCED = re.compile(r"(?ms)^```.*?^```$")
# Names of a pattern, not of a file.
_PATTERN = re.compile(r"\b(?:X|ROLE)\b")


def tracked() -> list[str]:
    """The files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    return listed.stdout.splitlines()


def documents() -> Iterator[tuple[str, str]]:
    """Each document's path, and its text without examples."""
    for name in tracked():
        if name.endswith(".md"):
            yield name, _FENCED.sub("", (ROOT / name).read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = _HEADING.findall(_FENCED.sub("", path.read_text(encoding="utf-8")))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_links_lead_to_files_and_sections() -> None:
    broken = []
    for name, text in documents():
        for target, section in _LINK.findall(text):
            path = (ROOT / name).parent / target if target else ROOT / name
            is_there = path.exists() and (not section or path.suffix != ".md" or section in anchors(path))
            broken += [] if is_there else [f"{name}: {target}#{section}"]
    assert broken == []


def test_files_that_are_named_exist() -> None:
    files = [f"/{name}" for name in tracked()]
    missing = [
        f"{name}: {path}"
        for name, text in documents()
        for path in _FILE.findall(text)
        if not _PATTERN.search(path) and not any(each.endswith(f"/{path.removeprefix('../')}") for each in files)
    ]
    assert missing == []
