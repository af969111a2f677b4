"""A lower bound on a text's number of tokens, to reject far too long texts unencoded."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from tokenizers import decoders, models

from services.tokenizer.text.vocabulary import Vocabulary

# Classes of bytes that every vocabulary represents directly, and classes that only byte-level ones do.
_PLAIN_CLASSES = [text.encode() for text in (string.ascii_letters, string.digits, string.punctuation)]
_BYTE_CLASSES = [string.whitespace.encode(), bytes(range(0x80, 0x100))]


class LeastTokens:
    """Divides the bytes of each class in a text by the most that one token has.

    Valid for tokenizers that drop no part of a text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        self._class_to_most: dict[bytes, int] = {}
        # Normalisation may merge several characters into one, unless they are ASCII.
        self._takes_ascii_only = tokenizer.normalizer is not None
        if not isinstance(tokenizer.model, models.BPE):
            return
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        tokens = _token_bytes(vocabulary, is_byte_level=is_byte_level)
        known = set(tokens)
        for members in [*_PLAIN_CLASSES, *(_BYTE_CLASSES if is_byte_level else [])]:
            # One unknown token may cover any number of bytes that the vocabulary does not know.
            if all(bytes([member]) in known for member in members):
                self._class_to_most[members] = _most(tokens, members)

    def of(self, text: str) -> int:
        """The bound; 0 if nothing is known."""
        if self._takes_ascii_only and not text.isascii():
            return 0
        data = text.encode()
        return max((-(-_count(data, members) // most) for members, most in self._class_to_most.items()), default=0)


def _token_bytes(vocabulary: Vocabulary, *, is_byte_level: bool) -> Sequence[bytes]:
    if is_byte_level:
        return list(vocabulary.bytes_of_id.values())
    return [token.encode() for token in vocabulary.token_to_id]


def _most(tokens: Iterable[bytes], members: bytes) -> int:
    """The most bytes of a class in one token, at least 1."""
    most = 1
    for token in tokens:
        if len(token) > most:
            most = max(most, _count(token, members))
    return most


def _count(data: bytes, members: bytes) -> int:
    return len(data) - len(data.translate(None, members))
