"""In how many source files an option that filters the draw is known: what a new one costs."""

from __future__ import annotations

import re

from tests.support.system.processes import ROOT

# .github/CONTRIBUTING.md says what each of them does with a new one.
_MOST_FILES = 18


def test_a_filter_of_the_draw_is_known_in_few_files() -> None:
    naming = [
        str(path.relative_to(ROOT))
        for folder in ("protos", "services", "shared")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".py", ".cpp", ".h", ".proto"}
        and "_pb2" not in path.name
        and re.search(r"\bmin_ps?\b", path.read_text(encoding="utf-8"))
    ]
    assert 10 < len(naming) <= _MOST_FILES, naming
