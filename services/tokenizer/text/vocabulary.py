"""The tokens of one tokenizer, and what is computed of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer


class Vocabulary:
    """Computes each product of a tokenizer's tokens when it is first asked for, and once.

    The tokenizer must not be modified after that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def token_to_id(self) -> Mapping[str, int]:
        """The ids of all tokens, added ones included."""
        tokens: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    @cached_property
    def model_token_to_id(self) -> Mapping[str, int]:
        """The same of the model's own tokens, of which added ones can be some."""
        added = (token.content for token in self.tokenizer.get_added_tokens_decoder().values())
        own_id = self.tokenizer.model.token_to_id
        others = {token for token in added if own_id(token) is None}
        return {token: token_id for token, token_id in self.token_to_id.items() if token not in others}

    @cached_property
    def longest_bytes(self) -> int:
        """The most bytes of a token's name."""
        return max(map(len, map(str.encode, self.token_to_id)))

    @cached_property
    def bytes_of_id(self) -> dict[int, bytes]:
        """The bytes of every token of a byte-level vocabulary.

        Source: GPT-2's `bytes_to_unicode`, which `tokenizers` follows: each character represents a byte. A token with
        any other character is an added one, encoded as UTF-8.
        """
        tokens = list(self.token_to_id)
        # All characters at once: one by one they take six times as long.
        characters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
        byte_of = _byte_of_character()
        data = byte_of[np.minimum(characters, byte_of.size - 1)]
        ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
        joined, bounds = data.astype(np.uint8).tobytes(), [0, *ends.tolist()]
        table = [joined[begin:end] for begin, end in itertools.pairwise(bounds)]
        for index in np.unique(np.searchsorted(ends, np.flatnonzero(data == _NO_BYTE), side="right")):
            table[index] = tokens[index].encode()
        return dict(zip(self.token_to_id.values(), table, strict=True))


_NO_BYTE = 256


def _byte_of_character() -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The byte that a character represents, by its code; `_NO_BYTE` for those without one, and as the last element."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted({*range(256)}.difference(printable))
    table = np.full(256 + len(others) + 1, _NO_BYTE, np.uint16)
    table[printable] = printable
    table[256:-1] = others
    return table
