"""A GGUF file's metadata: values are checked when they are read, and those that nothing reads are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from services.worker.weights.gguf_import.publisher_sampling import shortest_decimal

# Above any real model's sizes; tensor sizes are bounded too.
_HIGHEST = 2**48
_MAX_SHOWN = 60

WITHOUT_EFFECT: Mapping[str, str] = {
    "deepstack_mapping": "about images",
    "n_deepstack_layers": "about images",
    "rope.dimension_sections": "a token of text has one position, whatever sections of a head are rotated by",
    "rope.scaling.finetuned": "how the model was trained",
    "tensor_data_layout": "the order of rows, which the architecture decides",
    "vocab_size": "the embedding has as many rows",
}
"""Keys of every architecture that do not change what is computed for text, and why."""


class UnsupportedGgufError(Exception):
    """The file is not GGUF, or its model cannot be converted; the message does not name the file."""


class Metadata:
    """The values of one file, by key; those of the architecture are meant unless a key is given in full.

    Raises:
        UnsupportedGgufError: by every method that reads, if a required value is missing, or one is malformed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.architecture = self._text("general.architecture")
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def is_list(self, key: str) -> bool:
        """Whether there is a list of values."""
        return isinstance(self.values.get(f"{self.architecture}.{key}"), list)

    def size(self, key: str, *, default: int | None = None) -> int:
        """A whole number, at least 1. A list of equal numbers, one for each layer, counts as that number."""
        value = self._value(key, default)
        if isinstance(value, list) and value:
            if len(set(map(str, value))) > 1:
                raise UnsupportedGgufError(f"has {key} that differs between layers, which is not supported")
            value = value[0]
        if type(value) is not int or not 1 <= value <= _HIGHEST:
            raise UnsupportedGgufError(f"has {key} {value!r}, not a whole number of at least 1")
        return value

    def count(self, key: str, *, default: int | None = None) -> int:
        """A whole number, at least 0."""
        return 0 if self._value(key, default) == 0 else self.size(key)

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number: the shortest decimal of a float32."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UnsupportedGgufError(f"has {key} {value!r}, not a number")
        return shortest_decimal(value) if isinstance(value, float) else float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise UnsupportedGgufError(f"has {key} {value!r}, neither true nor false")
        return value

    def flags(self, key: str, length: int) -> list[bool]:
        """A list of at least `length` booleans; the rest is left out."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) < length or not all(type(each) is bool for each in value):
            raise UnsupportedGgufError(f"has {key} that is not a list of {length} booleans")
        return value[:length]

    def text(self, key: str, *, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise UnsupportedGgufError(f"has {key} {value!r}, not a string")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token, as `bos`; None if there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.values.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise UnsupportedGgufError(f"has {key} {value!r}, not the id of a token")
        return value

    def token_flag(self, name: str, *, default: bool) -> bool:
        """A boolean about tokens, as `add_bos_token`."""
        value = self.values.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not bool:
            raise UnsupportedGgufError(f"has tokenizer.ggml.{name} {value!r}, neither true nor false")
        return value

    def token_text(self, name: str, *, default: str = "") -> str:
        """A string about tokens, as `pre`."""
        value = self.values.get(f"tokenizer.{name}", default)
        if not isinstance(value, str):
            raise UnsupportedGgufError(f"has tokenizer.{name} that is not a string")
        return value

    def token_texts(self, name: str) -> list[str]:
        """A list of strings about tokens, as `merges`; empty if absent."""
        return self._list(f"tokenizer.ggml.{name}", (str,), "strings")

    def token_numbers(self, name: str) -> list[float]:
        """A list of finite numbers, one for each token, as `scores`; empty if absent."""
        values: list[float] = self._list(f"tokenizer.ggml.{name}", (int, float), "numbers")
        if not all(map(math.isfinite, values)):
            raise UnsupportedGgufError(f"has tokenizer.ggml.{name} with numbers that are not finite")
        return values

    def refuse_unread(self) -> None:
        """Refuse the architecture's keys that nothing has read, and that say something: a 0, false or "none" does not.

        Raises:
            UnsupportedGgufError: there are some; the message has them with their values.
        """
        prefix = f"{self.architecture}."
        keys = (key.removeprefix(prefix) for key in self.values if key.startswith(prefix))
        unread = sorted(key for key in keys if key not in self._read | WITHOUT_EFFECT.keys() and self._is_set(key))
        if unread:
            found = ", ".join(f"{key} = {_shown(self.values[prefix + key])}" for key in unread)
            raise UnsupportedGgufError(f"uses features that this release does not know, and a newer one may: {found}")

    def _is_set(self, key: str) -> bool:
        value = self.values[f"{self.architecture}.{key}"]
        return bool(value) and value != "none"

    def _list(self, key: str, kinds: tuple[type, ...], what: str) -> list[Any]:
        values = self.values.get(key, [])
        # A header's lists have values of one type.
        if not isinstance(values, list) or (values and type(values[0]) not in kinds):
            raise UnsupportedGgufError(f"has {key} that is not a list of {what}")
        return values

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.values.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise UnsupportedGgufError(f"lacks {key}")
        return value

    def _text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise UnsupportedGgufError(f"has {key} {value!r}, not a string" if key in self.values else f"lacks {key}")
        return value


def _shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, list | str) else value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
