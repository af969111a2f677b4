"""Incremental detokenization, which never returns half a character.

The text of a completion is what it adds to the decoded prompt, as in vLLM: decoders strip a space at the beginning of a
text, and the completion is not that beginning.

`tokenizers.decoders.DecodeStream` would take quadratic time on a long run of invalid UTF-8, and drop it at the end.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

from tokenizers import Tokenizer, decoders
from typing_extensions import override

from services.tokenizer.text.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"

# A token that is one byte in SentencePiece vocabularies; `ByteFallback` decodes it.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

# Text that ends with U+FFFD is held back until the window has `_MAX_WINDOW` ids. After text is returned, the last
# `_NUM_CONTEXT_IDS` ids stay as context, since decoding a token may depend on the ones before it.
_MAX_WINDOW = 64
_NUM_CONTEXT_IDS = 6

# The last ids of a prompt decide what a completion begins with: half a character has at most 3 bytes.
_NUM_PROMPT_IDS = _MAX_WINDOW


class Detokenizer(Protocol):
    """Detokenizes one completion.

    The joined results of all `push` calls and `flush` are what the ids add to the text of those before them, and do not
    depend on how they were split.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that has become certain."""

    def flush(self) -> str:
        """No more ids follow; returns the text held back, an incomplete character as U+FFFD."""


class TokenTexts(Protocol):
    """The texts of one vocabulary's tokens."""

    def detokenizer(self, prompt: Sequence[int] = (), *, skips_special_tokens: bool = True) -> Detokenizer:
        """Make one for a completion of `prompt`. Special tokens that are skipped have no text."""

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes, possibly part of a character; empty if unknown."""


def make_token_texts(vocabulary: Vocabulary) -> TokenTexts:
    """Prepare the tables that all completions share."""
    is_byte_level = isinstance(vocabulary.tokenizer.decoder, decoders.ByteLevel)
    return ByteLevelTexts(vocabulary) if is_byte_level else WindowTexts(vocabulary)


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the special tokens."""
    return frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def text_table(byte_of: dict[int, bytes]) -> dict[int, str]:
    """The text of every token whose bytes are complete characters."""
    table = {}
    for token_id, data in byte_of.items():
        # Not `suppress`, which takes longer than all else here.
        try:  # noqa: SIM105
            table[token_id] = data.decode()
        except UnicodeDecodeError:
            pass
    return table


class ByteLevelTexts(TokenTexts):
    """Texts of byte-level vocabularies: uses tables."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = special_token_ids(vocabulary.tokenizer)
        self._byte_of = vocabulary.bytes_of_id
        self._text_of = text_table(self._byte_of)
        self._plain_byte_of = {token_id: data for token_id, data in self._byte_of.items() if token_id not in special}
        self._plain_text_of = {token_id: text for token_id, text in self._text_of.items() if token_id not in special}

    @override
    def detokenizer(self, prompt: Sequence[int] = (), *, skips_special_tokens: bool = True) -> Detokenizer:
        byte_of, text_of = self._byte_of, self._text_of
        if skips_special_tokens:
            byte_of, text_of = self._plain_byte_of, self._plain_text_of
        return _after(prompt, ByteLevelDetokenizer(byte_of, text_of))

    @override
    def bytes_of(self, token_id: int) -> bytes:
        return self._byte_of.get(token_id, b"")


class WindowTexts(TokenTexts):
    """Texts of every other vocabulary: uses the library's decoder."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer = vocabulary.tokenizer
        self._special = special_token_ids(tokenizer)
        tokens = vocabulary.model_token_to_id.items()
        # A token to decode others after: decoders strip a leading space at the beginning of a text.
        characters = [token_id for token, token_id in tokens if len(token) == 1 and token.isascii()]
        self._context = sorted(characters)[:1]
        self._context_text = tokenizer.decode(self._context)
        single_bytes = ((token_id, self._single_byte(token, token_id)) for token, token_id in tokens)
        self._byte_of = {token_id: byte for token_id, byte in single_bytes if byte is not None}

    @override
    def detokenizer(self, prompt: Sequence[int] = (), *, skips_special_tokens: bool = True) -> Detokenizer:
        decode: Callable[[Sequence[int]], str] = self._tokenizer.decode
        skipped = self._special
        if not skips_special_tokens:
            decode, skipped = partial(self._tokenizer.decode, skip_special_tokens=False), frozenset()
        return _after(prompt, WindowDetokenizer(decode, skipped, self._byte_of, self._context))

    @override
    def bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return (token or "").encode()
        if (byte := self._byte_of.get(token_id)) is not None:
            return byte
        text: str = self._tokenizer.decode([*self._context, token_id])[len(self._context_text) :]
        return text.encode()

    def _single_byte(self, token: str, token_id: int) -> bytes | None:
        """The byte that the decoder makes of a token like <0x0A>; None for other tokens."""
        match = _BYTE_TOKEN.fullmatch(token)
        if match is None:
            return None
        byte = bytes.fromhex(match[1])
        text = self._tokenizer.decode([*self._context, token_id])[len(self._context_text) :]
        return byte if text == byte.decode(errors="replace") else None


class ByteLevelDetokenizer(Detokenizer):
    """Looks up texts, or bytes to decode, at a constant cost per token.

    Invariant: the pending bytes are the beginning of one character, at most 3 bytes.
    """

    def __init__(self, byte_of: dict[int, bytes], text_of: dict[int, str]) -> None:
        """Take `Vocabulary.bytes_of_id` and the result of `text_table`."""
        self._bytes_of = byte_of.get
        self._text_of = text_of
        self._pending = b""

    @override
    def push(self, token_ids: Sequence[int]) -> str:
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

    @override
    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDetokenizer(Detokenizer):
    """Decodes the last few ids again, and returns what was added to their text; joins bytes itself.

    `decode` replaces every byte of a run of byte tokens if one of them is invalid, which may come after characters that
    were returned. So a character is returned once it is complete, and each byte that belongs to none is one U+FFFD.

    Invariant: the window, which is the context and the ids held back, has no byte tokens; bytes that are held back came
    after it.

    Source: the two-offset window of vLLM and TGI, but bounded.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped: frozenset[int],
        byte_of: Mapping[int, bytes],
        stand_in: Sequence[int],
    ) -> None:
        """Prepare an empty text.

        Args:
            decode: Decodes ids that are not `skipped`.
            skipped: Special tokens without text.
            byte_of: The bytes of byte tokens.
            stand_in: Ids to decode others after where only bytes came before.
        """
        self._decode = decode
        self._skipped = skipped
        self._byte_of = byte_of
        self._stand_in = stand_in
        # Ids whose text was returned, those whose text is held back, and bytes that may begin a character.
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        self._bytes = b""

    @override
    def push(self, token_ids: Sequence[int]) -> str:
        # Special tokens are useless as context: they have no text, and decoders strip a leading space after them.
        shown = (token_id for token_id in token_ids if token_id not in self._skipped)
        text = ""
        for is_byte, group in groupby(shown, self._byte_of.__contains__):
            if is_byte:
                text += self._take_held() + self._take_bytes(group)
                continue
            text += self._end_bytes()
            self._held += group
            text += self._take_certain()
        return text

    @override
    def flush(self) -> str:
        return self._take_held() + self._end_bytes()

    def _take_certain(self) -> str:
        text = self._decode([*self._context, *self._held])
        # Where bytes are tokens, no other token is half a character.
        may_continue = text.endswith(_REPLACEMENT) and not self._byte_of
        if may_continue and len(self._context) + len(self._held) < _MAX_WINDOW:
            return ""
        return self._advance(text)

    def _take_held(self) -> str:
        return self._advance(self._decode([*self._context, *self._held])) if self._held else ""

    def _advance(self, text: str) -> str:
        added = text[len(self._context_text) :]
        self._set_context([*self._context, *self._held][-_NUM_CONTEXT_IDS:])
        self._held = []
        return added

    def _take_bytes(self, token_ids: Iterable[int]) -> str:
        if not self._context:
            self._set_context(list(self._stand_in))
        text, self._bytes = _decode_bytes(self._bytes + b"".join([self._byte_of[token_id] for token_id in token_ids]))
        return text

    def _end_bytes(self) -> str:
        text, self._bytes = _REPLACEMENT * len(self._bytes), b""
        return text

    def _set_context(self, token_ids: list[int]) -> None:
        self._context, self._context_text = token_ids, self._decode(token_ids)


def _decode_bytes(data: bytes) -> tuple[str, bytes]:
    """The characters, with one U+FFFD per invalid byte, as `ByteFallback` has it; and the beginning of another one."""
    text = ""
    while True:
        try:
            certain, num_decoded = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            text += data[: error.start].decode() + _REPLACEMENT * (error.end - error.start)
            data = data[error.end :]
        else:
            return text + certain, data[num_decoded:]


def _after(prompt: Sequence[int], detokenizer: Detokenizer) -> Detokenizer:
    """Let a new detokenizer continue after a prompt, of which half a character may be left."""
    if len(prompt):
        detokenizer.push(list(prompt[-_NUM_PROMPT_IDS:]))
    return detokenizer
