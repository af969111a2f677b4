"""Files of clients' keys."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def key_line(key: str, tenant: str = "a", **fields: Any) -> str:
    """The line that accepts a key."""
    return json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **fields})


def write_keys(path: Path, *lines: str) -> Path:
    """Replace the file by one with these lines, at once; returns its path."""
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return new.replace(path)
