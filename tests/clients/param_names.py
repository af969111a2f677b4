"""Prints the names that a library's types of requests have, as JSON: those of each type, and those inside with a dot.

Runs in the library's environment, which has none of our packages. Arguments: `MODULE:TYPE`, each a `TypedDict` or a
union of some. What is in lists, such as messages and tools, is left out.
"""

from __future__ import annotations

import importlib
import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

import typing_extensions

_LISTS = ("list", "Iterable", "Sequence")


def dicts_in(kind: Any) -> Iterator[Any]:
    """The `TypedDict`s of a type, not those in lists."""
    if typing_extensions.is_typeddict(kind):
        yield kind
        return
    if getattr(typing.get_origin(kind), "__name__", "") not in _LISTS:
        for inner in typing.get_args(kind):
            yield from dicts_in(inner)


def names_of(kind: Any) -> Iterator[str]:
    """The names of its fields and of those inside of them."""
    for each in dicts_in(kind):
        for name, inner in typing_extensions.get_type_hints(each).items():
            yield name
            for member in dicts_in(inner):
                yield from (f"{name}.{inside}" for inside in typing_extensions.get_type_hints(member))


def main() -> None:
    """Print them, by argument."""
    types = {each: each.split(":") for each in sys.argv[1:]}
    kinds = {each: getattr(importlib.import_module(module), name) for each, (module, name) in types.items()}
    sys.stdout.write(json.dumps({each: sorted(set(names_of(kind))) for each, kind in kinds.items()}))


if __name__ == "__main__":
    main()
