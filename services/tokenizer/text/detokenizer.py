"""Incremental detokenization, which never returns half a character.

`tokenizers.decoders.DecodeStream` would take quadratic time on a long run of invalid UTF-8, and drop it at the end.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"

# A token that is one byte in SentencePiece vocabularies; `ByteFallback` decodes it.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

# Text that ends with U+FFFD is held back until the window has `_MAX_WINDOW` ids. After text is returned, the last
# `_NUM_CONTEXT_IDS` ids stay as context, since decoding a token may depend on the ones before it.
_MAX_WINDOW = 64
_NUM_CONTEXT_IDS = 6


class Detokenizer(Protocol):
    """Detokenizes one completion.

    The joined results of all `push` calls and `flush` do not depend on how the ids were split.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that has become certain."""

    def flush(self) -> str:
        """No more ids follow; returns the text held back, an incomplete character as U+FFFD."""


class TokenTexts(Protocol):
    """The texts of one vocabulary's tokens."""

    def detokenizer(self, *, skips_special_tokens: bool = True) -> Detokenizer:
        """Special tokens that are skipped have no text."""

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes, possibly part of a character; empty if unknown."""


def make_token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Prepare the tables that all completions share."""
    return ByteLevelTexts(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else WindowTexts(tokenizer)


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the special tokens."""
    return frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every token of a byte-level vocabulary.

    Source: GPT-2's `bytes_to_unicode`, which `tokenizers` follows: each character represents a byte. A token with any
    other character is an added one, encoded as UTF-8.
    """
    byte_of = _byte_of_character()
    table = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes([byte_of[character] for character in token])
        except KeyError:
            table[token_id] = token.encode()
    return table


def text_table(byte_of: dict[int, bytes]) -> dict[int, str]:
    """The text of every token whose bytes are complete characters."""
    table = {}
    for token_id, data in byte_of.items():
        with contextlib.suppress(UnicodeDecodeError):
            table[token_id] = data.decode()
    return table


class ByteLevelTexts:
    """For byte-level vocabularies: uses tables."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = special_token_ids(tokenizer)
        self._byte_of = byte_table(tokenizer)
        self._text_of = text_table(self._byte_of)
        self._plain_byte_of = {token_id: data for token_id, data in self._byte_of.items() if token_id not in special}
        self._plain_text_of = {token_id: text for token_id, text in self._text_of.items() if token_id not in special}

    def detokenizer(self, *, skips_special_tokens: bool = True) -> Detokenizer:
        """See `TokenTexts.detokenizer`."""
        if skips_special_tokens:
            return ByteLevelDetokenizer(self._plain_byte_of, self._plain_text_of)
        return ByteLevelDetokenizer(self._byte_of, self._text_of)

    def bytes_of(self, token_id: int) -> bytes:
        """See `TokenTexts.bytes_of`."""
        return self._byte_of.get(token_id, b"")


class WindowTexts:
    """For every other vocabulary: uses the library's decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_token_ids(tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False).items()
        # A token to decode others after: decoders strip a leading space at the beginning of a text.
        characters = [token_id for token, token_id in vocabulary if len(token) == 1 and token.isascii()]
        self._context = sorted(characters)[:1]
        self._context_text = tokenizer.decode(self._context)

    def detokenizer(self, *, skips_special_tokens: bool = True) -> Detokenizer:
        """See `TokenTexts.detokenizer`."""
        if skips_special_tokens:
            return WindowDetokenizer(self._tokenizer.decode, self._special)
        return WindowDetokenizer(partial(self._tokenizer.decode, skip_special_tokens=False), frozenset())

    def bytes_of(self, token_id: int) -> bytes:
        """See `TokenTexts.bytes_of`."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return (token or "").encode()
        text: str = self._tokenizer.decode([*self._context, token_id])[len(self._context_text) :]
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte is not None and text == _REPLACEMENT else text.encode()


class ByteLevelDetokenizer:
    """Looks up texts, or bytes to decode, at a constant cost per token.

    Invariant: the pending bytes are the beginning of one character, at most 3 bytes.
    """

    def __init__(self, byte_of: dict[int, bytes], text_of: dict[int, str]) -> None:
        """Take the results of `byte_table` and `text_table`."""
        self._bytes_of = byte_of.get
        self._text_of = text_of
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        if not self._pending:
            text_of = self._text_of
            try:
                # Usually there is one token at a time.
                return text_of[token_ids[0]] if len(token_ids) == 1 else "".join([text_of[i] for i in token_ids])
            except KeyError:
                # One of them is part of a character, or has no text.
                pass
        bytes_of = self._bytes_of
        data = self._pending + b"".join([bytes_of(token_id, b"") for token_id in token_ids])
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDetokenizer:
    """Decodes the last few ids again, and returns what was added to their text.

    If invalid UTF-8 follows a character made of byte tokens, `decode` replaces that character too. It stays as
    returned.

    Source: the two-offset window of vLLM and TGI, but bounded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._context_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        # Special tokens are useless as context: they have no text, and decoders strip a leading space after them.
        self._window += [token_id for token_id in token_ids if token_id not in self._skipped]
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) < _MAX_WINDOW:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        added = text[len(self._context_text) :]
        self._window = self._window[-_NUM_CONTEXT_IDS:]
        self._context_text = self._decode(self._window)
        return added


def _byte_of_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
