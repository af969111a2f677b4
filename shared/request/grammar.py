"""What tokenizer and worker share about grammars.

The limits are set here, so that a grammar that compiles in the tokenizer also compiles in the worker. Compiling can
take seconds: nothing here may run on an event loop.

Source: llguidance, https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.model_files.model_dir import TOKENIZER, ModelDirectoryError, TokenizerFiles, read_tokenizer_files

_LIMITS = LLParserLimits(
    # Concurrent parses of one text. In an ambiguous grammar they increase with every token, and the cost of a mask
    # increases faster than their square: 20 ms at 500, a second at the library's default of 2,000.
    max_items_in_row=500,
    # Parses that computing one mask may try: about 3 µs each, so 30 ms. An object with 400 optional properties needs
    # half of it.
    step_max_items=10_000,
    # States of all regular expressions that a text has visited, 1 to 2 KB each. A JSON schema has some hundreds.
    max_lexer_states=30_000,
    # Error messages then do not include the text so far.
    verbose_errors=False,
)
_SILENT = 0

# Sets of tokens whose masks are computed once: for texts that allow all of a set. The library's own, without the line
# ends that a pattern's "." does not match (0.6 ms a mask for ".{1,500}" otherwise).
_SLICES = [slice_.replace(r"\x7F]", r"\x7F\x{2028}\x{2029}]") for slice_ in LLTokenizer.general_slices()]

# A line of a grammar in Lark's syntax: its texts may be cut into tokens in any way. By default the library cuts a text
# that has one continuation as the tokenizer would, and fails where that gives other bytes: an added token such as
# <think>, a normalized character, a space before the first word.
ANY_TOKENS = '%llguidance {"no_forcing": true}\n'

# Lines that show a part of the grammar or of a regular expression, and lines that point at it.
_EXCERPT = re.compile(r"\n +(?:\d+ \|.*|\^+ *$|(?=.*\n +\^).*)", re.MULTILINE)

# The library's quotes of what it was given, its advice that only its caller could follow, and what replaces them.
_REPLACEMENTS = (
    (re.compile(r'invalid regex ".*" \(in regex\): (regex parse error: error: )?'), ""),
    (re.compile(r" in regex /.*/$"), ""),
    (re.compile(r"Pointer '.*' does not exist"), "a reference leads nowhere"),
    (re.compile(r"Resource '.*' is not present in a registry.*"), "a reference to another document is not supported"),
    (re.compile(r"regex parse error: error: "), ""),
    (
        re.compile(r"oneOf constraints are not supported\. Enable .*"),
        '"oneOf" is supported only where its options are clearly mutually exclusive; "anyOf" has no such restriction',
    ),
    (re.compile(r"either increase limits\.\w+ or disable limits\.\w+"), "a terminal is too complex"),
)


class GrammarError(ValueError):
    """A grammar cannot be used. The message says why, and may quote the grammar."""


class GrammarLibrary:
    """Compiles grammars for one model's vocabulary. Thread-safe."""

    def __init__(self, model_dir: Path, eos_token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """Read the model's tokenizer: a quarter of a second for 50,000 tokens.

        Args:
            eos_token_ids: If empty, the tokenizer's own.
            num_tokens: The width of the masks, which is the model's logits width; the tokenizer may have fewer or more.
                None means the tokenizer's.

        Raises:
            ModelDirectoryError: the tokenizer is missing, malformed, or of a kind that the library does not support.
        """
        files = read_tokenizer_files(model_dir)
        self.tokenizer = _load_tokenizer(files, files.complete_text, eos_token_ids, num_tokens, _SLICES)
        self.num_tokens: int = num_tokens or self.tokenizer.vocab_size

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a text; `GrammarError` if the library rejects the grammar."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=_SILENT, limits=_LIMITS)
        check_matcher(matcher)
        return matcher

    def allowed_tokens(self, matcher: LLMatcher) -> npt.NDArray[np.bool_]:
        """Which tokens may come next: a new [num_tokens] array.

        Includes the end-of-sequence tokens if the text may end here; only them once it has ended, or after an error
        (`matcher.is_error`): no text fits, or following the grammar costs too much.
        """
        words = np.empty((self.tokenizer.vocab_size + 31) // 32, np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return np.unpackbits(words.view(np.uint8), count=self.num_tokens, bitorder="little").view(np.bool_)


def check_matcher(matcher: LLMatcher) -> None:
    """Raise `GrammarError` if the matcher has failed."""
    if matcher.is_error():
        raise GrammarError(_without_internals(matcher.get_error()))


def problem_of(grammar: str) -> str:
    """Why the library refuses a grammar, whatever the vocabulary is; empty if it does not."""
    return _without_internals(LLMatcher.validate_grammar(grammar, limits=_LIMITS))


def _without_internals(message: str) -> str:
    message = " ".join(_EXCERPT.sub("", message.partition("\n<non-verbose/>")[0]).split())
    for internal, instead in _REPLACEMENTS:
        message = internal.sub(instead, message)
    return "no text fits" if message.startswith("NoExtension") else message


def load_tokens(files: TokenizerFiles, eos_token_ids: Sequence[int], num_tokens: int | None = None) -> LLTokenizer:
    """The tokens that `GrammarLibrary` would have, at a third of its cost: they can be decoded, and nothing else.

    Merges, of which the library computes nothing, must be known to be valid.

    Raises:
        ModelDirectoryError: `GrammarLibrary` would raise it.
    """
    content = files.complete_content
    model = content["model"]
    # One is left to tell in which form they are.
    merges = {"merges": model["merges"][:1]} if model.get("merges") else {}
    source = json.dumps({**content, "model": {**model, **merges}})
    return _load_tokenizer(files, source, eos_token_ids, num_tokens, [])


def _load_tokenizer(
    files: TokenizerFiles, source: str, eos_token_ids: Sequence[int], num_tokens: int | None, slices: list[str]
) -> LLTokenizer:
    eos_token = list(eos_token_ids) or None
    try:
        try:
            return LLTokenizer(source, n_vocab=num_tokens, eos_token=eos_token, slices=slices)
        except ValueError:
            if num_tokens is None:
                raise
            # The tokenizer has tokens beyond the model's logits width.
            return LLTokenizer(source, eos_token=eos_token, slices=slices)
    except ValueError as error:
        raise ModelDirectoryError(f"{files.model_dir / TOKENIZER}: {error}") from error
