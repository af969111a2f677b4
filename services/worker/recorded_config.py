"""JSON objects that know which of their keys were asked for, at any depth.

So nobody keeps a list of what is read of a model's files: what was never asked for can be named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

# Bound the line about unknown keys.
_MAX_NAMES, _MAX_NAME = 32, 64

logger = logging.getLogger(__name__)


class RecordedConfig(Mapping[str, Any]):
    """A JSON object that knows which of its keys were asked for, present or not. Objects inside it know the same.

    Listing the keys asks for none of them; listing values or items, and copying, ask for all.
    """

    def __init__(self, values: Mapping[str, Any], *, sources: Sequence[RecordedConfig] = ()) -> None:
        """Record from now on; what is asked for also counts as asked for in `sources`."""
        self._values = {name: _recorded(value) for name, value in _without_record(values).items()}
        self._sources = sources
        self.read: set[str] = set()

    @override
    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return self._values[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)

    @override
    def __repr__(self) -> str:
        return repr(self._values)

    def unread(self) -> Iterator[str]:
        """The keys that were not asked for, unless they are null: a path with dots for those of objects inside.

        Of an object that was not asked for only its own key. A key of several objects in a list is named once.
        """
        for name, value in self._values.items():
            if name not in self.read:
                if value is not None:
                    yield name
                continue
            inside = [each for each in (value if isinstance(value, list) else [value]) if type(each) is RecordedConfig]
            yield from dict.fromkeys(f"{name}.{path}" for each in inside for path in each.unread())

    def _note(self, name: str) -> None:
        self.read.add(name)
        for source in self._sources:
            source._note(name)


def merged(*parts: Mapping[str, Any]) -> RecordedConfig:
    """The values of all parts, those of later ones first; what is asked for is recorded in each part that records."""
    values: dict[str, Any] = {}
    for part in parts:
        values.update(_without_record(part))
    return RecordedConfig(values, sources=[part for part in parts if isinstance(part, RecordedConfig)])


def warn_of_unknown(file: str, names: Sequence[str]) -> None:
    """Name the keys of a file of which nothing is known, if there are any."""
    if names:
        logger.warning(
            "%s has keys that this release does not know, and does without; a newer one may know them",
            file,
            extra={"keys": [name[:_MAX_NAME] for name in names[:_MAX_NAMES]], "num_keys": len(names)},
        )


def peek(values: Mapping[str, Any], name: str) -> Any:
    """The value of a key that is there, without a record."""
    return _without_record(values)[name]


def _without_record(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values._values if isinstance(values, RecordedConfig) else values


def _recorded(value: Any) -> Any:
    if isinstance(value, dict):
        return RecordedConfig(value)
    return [_recorded(each) for each in value] if isinstance(value, list) else value
