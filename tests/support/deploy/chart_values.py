"""Values of the chart for tests: the fewest that are valid, and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.deploy.chart import Tree

DIGEST = f"sha256:{'1' * 64}"
IMAGES = {part: {"image": {"digest": DIGEST}} for part in ("tokenizer", "scheduler", "workers")}
REGISTRY = {"registry": "registry.example.org/lockstep"}
TLS = {"trustDomain": "example.org", "issuer": {"name": "ca"}}
DOWNLOAD = {"repository": "acme/tiny-llama", "commit": "4" * 40}


def values(cell: Mapping[str, Any] | None = None, **top: Any) -> Tree:
    """The fewest values that are valid, with more of a cell, or of the top."""
    own: Tree = {"name": "main", "model": {"pvc": "models"}, "tls": TLS, **IMAGES}
    for part, more in (cell or {}).items():
        own[part] = {**own.get(part, {}), **more} if isinstance(more, dict) else more
    return {"cells": [own], "images": REGISTRY, **top}


def workers(**more: Any) -> Tree:
    return values({"workers": more})


def pools(*pools: Tree, cells: Sequence[Tree] = (), **top: Any) -> Tree:
    """InferencePools, of the cell `main` unless they say otherwise, and the peers that they need; with more cells."""
    whole = [
        {"name": "main", "cells": ["main"], "endpointPicker": {"name": "picker", "port": 9002}, **pool}
        for pool in pools
    ]
    network = {"endpointPickers": [{"podSelector": {"matchLabels": {"app": "picker"}}}]}
    few = values(**{"networkPolicy": network, "inferencePools": whole, **top})
    return {**few, "cells": [*few["cells"], *({**few["cells"][0], **cell} for cell in cells)]}


def downloaded_values(cell: Mapping[str, Any] | None = None, **top: Any) -> Tree:
    """Values of a cell whose model is downloaded, with more of it, or of the top."""
    more: Tree = dict(cell or {})
    own = more.get("model", {})
    model = {"pvc": "", **own, "download": {**DOWNLOAD, **own.get("download", {})}}
    return values({**more, "model": model}, **top)
