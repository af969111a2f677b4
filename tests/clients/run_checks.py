"""Runs the checks of a Python client, in its environment: `run_checks.py NAME`. It needs the standard library only.

Each line of stdin is a JSON object with the names of a check and its file, and its arguments; each is answered by a
line on stdout.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]


def load_modules(client: str) -> dict[str, types.ModuleType]:
    """The files `*checks.py` of a client's folder, by name."""
    # So that files can import each other, but not our own packages, nor another one named "tests".
    tests = sys.modules["tests"] = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    names = [path.stem for path in (ROOT / "tests" / "clients" / client).glob("*checks.py")]
    return {name: importlib.import_module(f"tests.clients.{client}.{name}") for name in names}


def run_check(check: Callable[..., Any], arguments: list[Any]) -> str:
    """Run a check; returns its error, empty if there was none."""
    values = [SimpleNamespace(**value) if isinstance(value, dict) else value for value in arguments]
    try:
        result = check(*values)
        if inspect.isawaitable(result):
            asyncio.run(_wait(result))
    except Exception:  # noqa: BLE001 - whatever a check raises is its result
        return traceback.format_exc()
    return ""


async def _wait(result: Any) -> None:
    await result


def main() -> None:
    """Answer all lines."""
    # Clients write to stdout, too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    modules = load_modules(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        error = run_check(getattr(modules[asked["file"]], asked["check"]), asked["arguments"])
        print(json.dumps({"check": asked["check"], "ok": not error, "error": error}), file=answers, flush=True)


if __name__ == "__main__":
    main()
