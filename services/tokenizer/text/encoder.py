"""Encodes text to token ids, long texts in parts, and decodes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, models

from services.tokenizer.text.control_tokens import ControlTokens, control_tokens_of
from services.tokenizer.text.least_tokens import LeastTokens
from services.tokenizer.text.text_cuts import PART_LENGTH, TextCutter
from services.tokenizer.text.tokenizer_copies import TokenizerParts
from services.tokenizer.text.vocabulary import Vocabulary
from shared.model_files.model_dir import ModelDirectoryError
from shared.request.limits import TOKEN_DTYPE


class _Text(NamedTuple):
    text: str
    is_beginning: bool
    """Whether it is in the first piece."""


class Encoder:
    """Encodes and decodes with one tokenizer. Encoded text never becomes a control token.

    Costs about a millisecond per thousand tokens. The library's batch calls release the GIL, other calls do not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The tokenizer is not modified, and must not be.

        Raises:
            ModelDirectoryError: it encodes plain text to a control token.
        """
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        tokens = control_tokens_of(tokenizer)
        self.control_tokens = ControlTokens(tokens)
        self.added_tokens = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        # The texts of the special tokens, which decoding skips.
        self.special_tokens = frozenset(token.content for token in tokens.values() if token.special)
        parts = TokenizerParts.of(tokenizer)
        self._plain = self._continuing = _plain_tokenizer(parts, tokens.values())
        if parts.marks_beginning:
            self._continuing = _plain_tokenizer(parts.without_marks(), tokens.values())
        _check_plain(self._continuing, tokens)
        self._cutter = TextCutter(TokenizerParts.of(self._plain), self.vocabulary)
        self._least_tokens = LeastTokens(self.vocabulary) if self._cutter.rule is not None else None
        self._before, self._after = _tokens_around(self._plain)

    def least_tokens(self, text: str) -> int:
        """A cheap lower bound on a text's number of tokens."""
        return 0 if self._least_tokens is None else self._least_tokens.of(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """Encode a text, which may be empty, to ids: [num_tokens].

        `add_special_tokens` adds the post-processor's tokens, such as BOS.
        """
        return np.concatenate(list(self.encode_in_parts([text], add_special_tokens=add_special_tokens)))

    def encode_pieces(self, pieces: Sequence[str | int]) -> npt.NDArray[np.int32]:
        """Encode texts and the token ids between them; only the first piece begins a text."""
        return np.concatenate(list(self.encode_in_parts(pieces)))

    def encode_in_parts(
        self, pieces: Sequence[str | int], *, add_special_tokens: bool = False
    ) -> Iterator[npt.NDArray[np.int32]]:
        """Encode pieces in runs, at least one, each some milliseconds if the texts can be cut."""
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        batch: list[_Text | int] = []
        length = 0
        for part in itertools.chain(before, self._parts(pieces), after):
            batch.append(part)
            length += 1 if isinstance(part, int) else len(part.text)
            if length >= PART_LENGTH:
                yield self._encode_batch(batch)
                batch, length = [], 0
        yield self._encode_batch(batch)

    def _parts(self, pieces: Iterable[str | int]) -> Iterator[_Text | int]:
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                yield piece
            else:
                yield from (_Text(part, is_beginning=not index) for part in self._cutter.parts(piece))

    def _encode_batch(self, batch: Sequence[_Text | int]) -> npt.NDArray[np.int32]:
        # Without duplicates: the texts between the turns of a conversation are mostly the same few.
        texts = [part for part in dict.fromkeys(batch) if not isinstance(part, int)]
        ids_of: dict[_Text, list[int]] = {}
        for tokenizer, is_beginning in ((self._plain, True), (self._continuing, False)):
            chosen = [text for text in texts if text.is_beginning is is_beginning]
            encodings = tokenizer.encode_batch_fast([text.text for text in chosen], add_special_tokens=False)
            ids_of.update((text, encoding.ids) for text, encoding in zip(chosen, encodings, strict=True))
        token_ids: list[int] = []
        for part in batch:
            token_ids += [part] if isinstance(part, int) else ids_of[part]
        return np.array(token_ids, TOKEN_DTYPE)

    def decode(self, token_ids: npt.NDArray[np.integer], *, skips_special_tokens: bool = True) -> str:
        """Decode ids to text; an id without a token has no text."""
        return str(self.tokenizer.decode_batch([token_ids.tolist()], skip_special_tokens=skips_special_tokens)[0])


def _plain_tokenizer(parts: TokenizerParts, control_tokens: Iterable[AddedToken]) -> Tokenizer:
    """Treats control tokens as text, and neither truncates nor pads."""
    plain = parts.assemble()
    # The library can only treat tokens as text that it considers special.
    plain.add_special_tokens([AddedToken(token.content, special=True, normalized=False) for token in control_tokens])
    plain.encode_special_tokens = True
    return plain


def _check_plain(tokenizer: Tokenizer, control_tokens: dict[int, AddedToken]) -> None:
    texts = [token.content for token in control_tokens.values()]
    for token_id, encoding in zip(
        control_tokens, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        if token_id in encoding.ids:
            raise ModelDirectoryError(f"the tokenizer encodes plain text to token {token_id}, which is special")


def _tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor adds before and after a text."""
    if tokenizer.post_processor is None:
        return [], []
    text = Tokenizer(models.WordLevel({"text": 0})).encode("text")
    encoding = tokenizer.post_processor.process(text)
    start = encoding.sequence_ids.index(0)
    return encoding.ids[:start], encoding.ids[start + 1 :]
