"""What tokenizer and worker both do with a grammar: compile it, and tell which tokens may come next.

The library's limits stand here once, so that what compiled in the one compiles in the other. Nothing here is for an
event loop: a grammar that somebody sent can take seconds.

Source: llguidance, https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.model_dir import TOKENIZER, ModelDirectoryError

_LIMITS = LLParserLimits(
    # Parses of one text at once. An ambiguous grammar has more with every token, and a mask costs more than their
    # square: 20 ms at 500, a second at the library's own 2,000.
    max_items_in_row=500,
    # States of all regular expressions that a text has met, 1 to 2 KB each. A JSON schema's are some hundreds.
    max_lexer_states=30_000,
    # Messages without the text so far.
    verbose_errors=False,
)
_SILENT = 0

# What the library advises that only whoever calls it could do, and what is said instead.
_ADVICE_TO_CALLERS = (
    (
        re.compile(r"oneOf constraints are not supported\. Enable .*"),
        '"oneOf" is supported only where its options plainly exclude each other; "anyOf" has no such rule',
    ),
    (re.compile(r"either increase limits\.\w+ or disable limits\.\w+"), "a terminal is too complex"),
)


class GrammarError(ValueError):
    """A grammar cannot be used. The message says why; it may quote the grammar."""


class GrammarLibrary:
    """Compiles grammars for one model's vocabulary. Any thread may use it."""

    def __init__(self, model_dir: Path, eos_token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """Read the model's tokenizer: a quarter of a second for 50,000 tokens.

        Args:
            model_dir: The model's directory.
            eos_token_ids: What ends a text; if there is none, the token that the tokenizer itself ends texts with.
            num_tokens: Tokens of the model, which masks have: the tokenizer may know fewer or more. Absent, masks have
                the tokenizer's.

        Raises:
            ModelDirectoryError: the tokenizer is missing or malformed, or of a kind that the library does not know.
        """
        path = model_dir / TOKENIZER
        try:
            self.tokenizer = _load_tokenizer(path.read_text(encoding="utf-8"), list(eos_token_ids), num_tokens)
        except (OSError, ValueError) as error:
            raise ModelDirectoryError(f"{path}: {error}") from error
        self.num_tokens: int = num_tokens or self.tokenizer.vocab_size

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a text.

        Raises:
            GrammarError: the library refuses the grammar.
        """
        matcher = LLMatcher(self.tokenizer, grammar, log_level=_SILENT, limits=_LIMITS)
        check_matcher(matcher)
        return matcher

    def allowed_tokens(self, matcher: LLMatcher) -> npt.NDArray[np.bool_]:
        """Which tokens may come next: a new column of `num_tokens`.

        End-of-sequence tokens may where the text may end. They alone may once it has ended, and when the matcher fails,
        which `matcher.is_error` tells: nothing fits behind the text, or following it costs too much.
        """
        words = np.empty((self.tokenizer.vocab_size + 31) // 32, np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return np.unpackbits(words.view(np.uint8), count=self.num_tokens, bitorder="little").view(np.bool_)


def check_matcher(matcher: LLMatcher) -> None:
    """Tell what a matcher has run into.

    Raises:
        GrammarError: it has failed.
    """
    if matcher.is_error():
        message = matcher.get_error().partition("\n<non-verbose/>")[0]
        for advice, instead in _ADVICE_TO_CALLERS:
            message = advice.sub(instead, message)
        raise GrammarError("no text fits" if message.startswith("NoExtension") else message)


def _load_tokenizer(source: str, eos_token_ids: list[int], num_tokens: int | None) -> LLTokenizer:
    try:
        return LLTokenizer(source, n_vocab=num_tokens, eos_token=eos_token_ids or None)
    except ValueError:
        if num_tokens is None:
            raise
        # A tokenizer may have tokens that the model has no logits for.
        return LLTokenizer(source, eos_token=eos_token_ids or None)
