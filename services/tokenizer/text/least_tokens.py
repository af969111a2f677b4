"""How many tokens a text has at least, by counting its bytes: tells of a far too long one without encoding it."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models

from services.tokenizer.text.detokenizer import byte_table

# Bytes that stand for themselves wherever a vocabulary is written down, and those that only byte-level ones write so.
_PLAIN_CLASSES = [text.encode() for text in (string.ascii_letters, string.digits, string.punctuation)]
_BYTE_CLASSES = [string.whitespace.encode(), bytes(range(0x80, 0x100))]


class LeastTokens:
    """For a tokenizer that leaves out nothing of a text: a token covers only so many bytes of a class."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._class_to_most: dict[bytes, int] = {}
        # Normalisation makes one character of several, unless they are ASCII.
        self._takes_ascii_only = tokenizer.normalizer is not None
        if not isinstance(tokenizer.model, models.BPE):
            return
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        tokens = _token_bytes(tokenizer, is_byte_level=is_byte_level)
        known = set(tokens)
        for members in [*_PLAIN_CLASSES, *(_BYTE_CLASSES if is_byte_level else [])]:
            # Of what the vocabulary does not know, one token may cover any number.
            if all(bytes([member]) in known for member in members):
                self._class_to_most[members] = _most(tokens, members)

    def of(self, text: str) -> int:
        """A number of tokens that the text has at least; it may have many more."""
        if self._takes_ascii_only and not text.isascii():
            return 0
        data = text.encode()
        return max((-(-_count(data, members) // most) for members, most in self._class_to_most.items()), default=0)


def _token_bytes(tokenizer: Tokenizer, *, is_byte_level: bool) -> Sequence[bytes]:
    if is_byte_level:
        return list(byte_table(tokenizer).values())
    return [token.encode() for token in tokenizer.get_vocab(with_added_tokens=True)]


def _most(tokens: Iterable[bytes], members: bytes) -> int:
    """Most bytes of a class that one token has."""
    most = 1
    for token in tokens:
        if len(token) > most:
            most = max(most, _count(token, members))
    return most


def _count(data: bytes, members: bytes) -> int:
    return len(data) - len(data.translate(None, members))
