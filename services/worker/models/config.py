"""Reads config.json; an error names the wrong value."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from shared.model_files.model_dir import ModelDirectoryError

_NO_DEFAULTS: Mapping[str, Any] = {}

# Above any real model's sizes. Python's integers are unbounded, tensor sizes are not.
_HIGHEST = 2**48


class _WithDefaults(Mapping[str, Any]):
    """A config.json with a family's defaults for what is absent or null. It reads no key before it is asked for."""

    def __init__(self, json: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._json = json
        self._defaults = defaults

    @override
    def __getitem__(self, name: str) -> Any:
        value = self._json.get(name)
        return self._defaults[name] if value is None and name in self._defaults else self._json[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter({**self._defaults, **self._json})

    @override
    def __len__(self) -> int:
        return len({**self._defaults, **self._json})


class ConfigValues:
    """The values of one config.json. A null counts as absent, because transformers writes absent values as null.

    A method that takes several names uses the first one present. Without a default the value is required.

    Raises:
        ModelDirectoryError: by every method, and by functions that read from it, when a value is missing, malformed,
            not supported, out of range or contradicts another.
    """

    def __init__(self, json: Mapping[str, Any], defaults: Mapping[str, Any] = _NO_DEFAULTS) -> None:
        """Read `json`; `defaults` are the family's, for what has none of its names there, or null."""
        self._file = json
        self.json = _WithDefaults(json, defaults) if defaults else json

    def __contains__(self, name: str) -> bool:
        return self.json.get(name) is not None

    def size(self, *names: str, default: int | None = None, highest: int = _HIGHEST) -> int:
        """A whole number, at least 1."""
        return self._whole(names, default, range(1, highest + 1))

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number, at least 0."""
        return self._whole(names, default, range(_HIGHEST + 1))

    def optional_size(self, name: str) -> int | None:
        """A whole number, at least 1; None if absent."""
        return self.size(name) if name in self else None

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number within the range of a float."""
        name, value = self._find(names, default)
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise ModelDirectoryError(f"config.json: {name} is {value!r}, not a number")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """A boolean."""
        name, value = self._find(names, default)
        if type(value) is not bool:
            raise ModelDirectoryError(f"config.json: {name} is {value!r}, neither true nor false")
        return value

    def choice(self, name: str, supported: tuple[str, ...], *, default: str) -> str:
        """One of the `supported` strings."""
        _, value = self._find((name,), default)
        if value not in supported:
            raise ModelDirectoryError(
                f"config.json: {name} {value!r} is not supported; supported: {', '.join(supported)}"
            )
        return str(value)

    def only(self, name: str, *supported: object) -> None:
        """Refuse any value but the `supported` ones: what is computed is what those mean. Absent is one of them."""
        if name in self and self.json[name] not in supported:
            raise ModelDirectoryError(
                f"config.json: {name} is {self.json[name]!r}, which is not supported; supported: "
                f"{', '.join(map(repr, supported))}"
            )

    def texts(self, name: str, length: int) -> tuple[str, ...] | None:
        """A list of `length` strings; None if absent."""
        value = self.json.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(text, str) for text in value):
            raise ModelDirectoryError(f"config.json: {name} is not a list of {length} strings")
        return tuple(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, each at least 0; empty if absent."""
        _, value = self._find((name,), [])
        if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
            raise ModelDirectoryError(f"config.json: {name} is not a list of non-negative whole numbers")
        return tuple(value)

    def _whole(self, names: tuple[str, ...], default: int | None, allowed: range) -> int:
        name, value = self._find(names, default)
        if type(value) is not int:
            raise ModelDirectoryError(f"config.json: {name} is {value!r}, not a whole number")
        if value < allowed.start:
            raise ModelDirectoryError(f"config.json: {name} is {value}, must be at least {allowed.start}")
        if value not in allowed:
            raise ModelDirectoryError(f"config.json: {name} is {value}, must be at most {allowed.stop - 1}")
        return value

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        """The first name present, and its value."""
        for values in (self._file, self.json):
            for name in names:
                if values.get(name) is not None:
                    return name, values[name]
        if default is None:
            is_null = any(name in self.json for name in names)
            raise ModelDirectoryError(f"config.json: {' or '.join(names)} is {'null' if is_null else 'missing'}")
        return names[0], default
