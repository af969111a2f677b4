"""The table in services/README.md of families that run transformers' code, as `make proofs` has proven them.

Whoever adds a family runs `make proofs`, or its rows alone:
`python -m pytest tests/parity/test_generic_models.py -m "proof or not proof"`. If all of them pass, the data and the
document are written.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import transformers

from tests.support.models.generic_proofs import BACKENDS, RANKS, WAYS, ProofRow, all_rows
from tests.support.system.processes import ROOT
from tests.support.tables.generated_tables import replace_tables

DOCUMENT = ROOT / "services" / "README.md"
DATA = ROOT / "tests" / "parity" / "generic_models.json"
BEGIN = "<!-- Made by `make proofs`, of tests/parity/generic_models.json. -->\n"
END = "<!-- The end of what `make proofs` makes. -->\n"

_SPLIT = "all layers are split"
_ATTENTION = "attention is whole on each rank, or a part of it"
_NETWORKS = "feed-forward networks are whole on each rank, or a part of them"
_BOTH = "both are whole, or parts of them"
_ONE = "refused: transformers has no plan"


@dataclass
class ProvenRows:
    """The rows that have passed in this run."""

    rows: set[ProofRow] = field(default_factory=set)
    whole_layers: dict[str, list[str] | None] = field(default_factory=dict)
    """By architecture: kinds of layers that each of several ranks computes whole; None without a plan."""

    def write_if_whole(self) -> None:
        """Write data and document if every row of the table has passed."""
        if not self.rows.issuperset(all_rows()):
            return
        data = {
            "transformers": transformers.__version__,
            "rows": sorted(map(str, all_rows())),
            "whole_layers": dict(sorted(self.whole_layers.items())),
        }
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        document = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_table(document, data), encoding="utf-8")


def read_data() -> dict[str, Any]:
    """What the last whole run has proven."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def with_table(document: str, data: dict[str, Any]) -> str:
    """The document's text with its table replaced; raises ValueError if it does not have the two marks, in order."""
    return replace_tables(document, BEGIN, END, render_table(data))


def render_table(data: dict[str, Any]) -> str:
    """Families by what two ranks make of them, and what was computed of each."""
    families: dict[str, list[str]] = defaultdict(list)
    for name, layers in data["whole_layers"].items():
        families[_on_ranks(layers)].append(f"`{name}`")
    rows = "".join(
        f"| {kind} | {', '.join(sorted(families[kind]))} |\n"
        for kind in (_SPLIT, _ATTENTION, _NETWORKS, _BOTH, _ONE)
        if families[kind]
    )
    proven = (
        f"Proven with transformers {data['transformers']}: {len(data['rows'])} rows have every pair of a family, a way "
        f"of computing ({', '.join(WAYS)}), products ({', '.join(BACKENDS)}) and ranks "
        f"({', '.join(map(str, RANKS))}). Experts, embeddings and head are split in any case."
    )
    return f"{textwrap.fill(proven, 120)}\n\n| on several ranks | families |\n|---|---|\n{rows}\n"


def _on_ranks(layers: Collection[str] | None) -> str:
    if layers is None:
        return _ONE
    if not layers:
        return _SPLIT
    has_attention = any("attn" in layer for layer in layers)
    has_networks = any("attn" not in layer for layer in layers)
    return _BOTH if has_attention and has_networks else _ATTENTION if has_attention else _NETWORKS
