"""From text to token ids and back, a long text in parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, models

from services.tokenizer.text.control_tokens import ControlTokens, control_tokens_of
from services.tokenizer.text.least_tokens import LeastTokens
from services.tokenizer.text.text_cuts import PART_LENGTH, TextCutter
from shared.limits import TOKEN_DTYPE
from shared.model_dir import TOKENIZER, ModelDirectoryError

# Vocabularies made by SentencePiece mark where a text begins; what has other text before it must not be marked. As
# they stand in a tokenizer's JSON, and within no string of it.
_MARKS_BEGINNING, _MARKS_NOTHING = '"prepend_scheme":"first"', '"prepend_scheme":"never"'


class _Text(NamedTuple):
    """A text to encode, or a part of one; `is_beginning` where nothing comes before it."""

    text: str
    is_beginning: bool


class Encoder:
    """One tokenizer. Text that is encoded never becomes a control token.

    What it does takes time, a millisecond per thousand tokens. Its calls are the library's batch ones:
    `Tokenizer.encode` and `decode` keep the interpreter's lock for the whole text, the batch ones release it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take a tokenizer, which is left as it is.

        Raises:
            ModelDirectoryError: it makes a control token of plain text.
        """
        self.tokenizer = tokenizer
        tokens = control_tokens_of(tokenizer)
        self.control_tokens = ControlTokens(tokens)
        self.added_tokens = frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values())
        # The texts that decoding leaves out.
        self.special_tokens = frozenset(token.content for token in tokens.values() if token.special)
        source = tokenizer.to_str()
        self._plain = self._continuing = _plain_tokenizer(source, tokens.values())
        if _MARKS_BEGINNING in source:
            source = source.replace(_MARKS_BEGINNING, _MARKS_NOTHING)
            self._continuing = _plain_tokenizer(source, tokens.values())
        _check_plain(self._continuing, tokens)
        self._cutter = TextCutter(self._plain)
        self._least_tokens = LeastTokens(self._plain) if self._cutter.rule is not None else None
        self._before, self._after = _tokens_around(self._plain)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, without encoding it; often it has many more."""
        return 0 if self._least_tokens is None else self._least_tokens.of(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """The ids of `text`: [num_tokens].

        Args:
            text: May be empty; what it has of control tokens is text like any other.
            add_special_tokens: Whether the tokenizer's own post-processor adds its tokens, as BOS.
        """
        return np.concatenate(list(self.encode_in_parts([text], add_special_tokens=add_special_tokens)))

    def encode_pieces(self, pieces: Sequence[str | int]) -> npt.NDArray[np.int32]:
        """The ids of texts, and of the tokens between them; only the first piece is the beginning of a text."""
        return np.concatenate(list(self.encode_in_parts(pieces)))

    def encode_in_parts(
        self, pieces: Sequence[str | int], *, add_special_tokens: bool = False
    ) -> Iterator[npt.NDArray[np.int32]]:
        """The ids of pieces in runs, at least one, each of which takes some milliseconds if the texts can be cut."""
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
        # Most are the same few, between the turns of a conversation.
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
        """The text of ids, special tokens left out unless told otherwise; no token has no text."""
        return str(self.tokenizer.decode_batch([token_ids.tolist()], skip_special_tokens=skips_special_tokens)[0])


def _plain_tokenizer(source: str, control_tokens: Iterable[AddedToken]) -> Tokenizer:
    """A tokenizer, by its JSON, to which control tokens are text, and that cuts nothing off."""
    plain = Tokenizer.from_str(source)
    plain.no_truncation()
    plain.no_padding()
    # The library reads as text only what it takes for special.
    plain.add_special_tokens([AddedToken(token.content, special=True, normalized=False) for token in control_tokens])
    plain.encode_special_tokens = True
    return plain


def _check_plain(tokenizer: Tokenizer, control_tokens: dict[int, AddedToken]) -> None:
    texts = [token.content for token in control_tokens.values()]
    for token_id, encoding in zip(
        control_tokens, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        if token_id in encoding.ids:
            raise ModelDirectoryError(f"the tokenizer makes token {token_id}, which is special, of plain text")


def _tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer's own post-processor puts before a text and after it."""
    if tokenizer.post_processor is None:
        return [], []
    text = Tokenizer(models.WordLevel({"text": 0})).encode("text")
    encoding = tokenizer.post_processor.process(text)
    start = encoding.sequence_ids.index(0)
    return encoding.ids[:start], encoding.ids[start + 1 :]


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Read the directory's tokenizer.

    Raises:
        ModelDirectoryError: it is missing or malformed.
    """
    path = model_dir / TOKENIZER
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ModelDirectoryError(f"{path}: {error}") from error
