"""Encodes and decodes off the event loop, in a few threads that do nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from services.tokenizer.control_tokens import ControlTokens, control_tokens_of
from shared.limits import TOKEN_DTYPE
from shared.model_dir import TOKENIZER, ModelDirectoryError

T = TypeVar("T")

# Vocabularies made by SentencePiece mark where a text begins; what has other text before it must not be marked. As
# they stand in a tokenizer's JSON, and within no string of it.
_MARKS_BEGINNING, _MARKS_NOTHING = '"prepend_scheme":"first"', '"prepend_scheme":"never"'


class Encoder:
    """One tokenizer and its threads. Text that is encoded never becomes a control token.

    Its calls are the library's batch ones: `Tokenizer.encode` and `decode` keep the interpreter's lock for the
    whole text, the batch ones release it.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_threads: int) -> None:
        """Take a tokenizer, which is left as it is, and start threads.

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
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the threads; cancelled while it waits for one, it is not run."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """The ids of `text`: [num_tokens]. For `run`: it takes a millisecond per thousand tokens.

        Args:
            text: May be empty; what it has of control tokens is text like any other.
            add_special_tokens: Whether the tokenizer's own post-processor adds its tokens, as BOS.
        """
        encoding = self._plain.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.array(encoding.ids, TOKEN_DTYPE)

    def encode_pieces(self, pieces: Sequence[str | int]) -> npt.NDArray[np.int32]:
        """The ids of texts, each as `encode` without special tokens, and of the tokens between them. For `run`."""
        first, *others = pieces
        # Most are the same few, between the turns of a conversation.
        texts = list({piece for piece in others if isinstance(piece, str)})
        encodings = self._continuing.encode_batch_fast(texts, add_special_tokens=False)
        ids_of = {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}
        token_ids = self.encode(first, add_special_tokens=False).tolist() if isinstance(first, str) else [first]
        for piece in others:
            token_ids += ids_of[piece] if isinstance(piece, str) else [piece]
        return np.array(token_ids, TOKEN_DTYPE)

    def decode(self, token_ids: npt.NDArray[np.integer], *, skips_special_tokens: bool = True) -> str:
        """The text of ids, special tokens left out unless told otherwise; no token has no text. For `run`."""
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
