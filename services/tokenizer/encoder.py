"""Encodes and decodes off the event loop, in a few threads that do nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shared.limits import TOKEN_DTYPE
from shared.model_dir import TOKENIZER, ModelDirectoryError

T = TypeVar("T")


class Encoder:
    """One tokenizer and its threads.

    Its calls are the library's batch ones: `Tokenizer.encode` and `decode` keep the interpreter's lock for the
    whole text, the batch ones release it.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_threads: int) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the threads; cancelled while it waits for one, it is not run."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """The ids of `text`: [num_tokens]. For `run`: it takes a millisecond per thousand tokens.

        Args:
            text: May be empty.
            add_special_tokens: Whether the tokenizer's own post-processor adds its tokens, as BOS.
        """
        encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.array(encoding.ids, TOKEN_DTYPE)

    def decode(self, token_ids: npt.NDArray[np.integer]) -> str:
        """The text of ids, special tokens left out; ids without a token have none. For `run`."""
        return str(self.tokenizer.decode_batch([token_ids.tolist()], skip_special_tokens=True)[0])


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
