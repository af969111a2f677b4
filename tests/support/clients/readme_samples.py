"""The sample clients of the documents."""

from __future__ import annotations

import re

from tests.support.system.processes import ROOT

ADDRESS = "127.0.0.1:50051"
"""Where each sample expects the service."""

_DOCUMENTS = (ROOT / "README.md", ROOT / "protos" / "README.md")
_SAMPLE = re.compile(r"^```(python|js)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def samples() -> dict[str, str]:
    """The documents' samples, by language."""
    found = [sample for document in _DOCUMENTS for sample in _SAMPLE.findall(document.read_text(encoding="utf-8"))]
    assert sorted(language for language, _ in found) == ["js", "python"]
    return dict(found)
