"""Our grammars as a contestant: llguidance with our limits and our additional refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from services.tokenizer.grammar.grammar_source import grammar_source
from shared.request.grammar import GrammarLibrary
from tests.bench.peers.grammar_contestant import Suite
from tests.bench.peers.protocol import serve


class LlguidanceMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((num_tokens + 31) // 32, np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """See `Matcher`."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        self._matcher.consume_token(token_id)


class LlguidanceGrammars:
    """See `Grammars`."""

    def __init__(self, model_dir: str, eos_token_id: int) -> None:
        self._library = GrammarLibrary(Path(model_dir), (eos_token_id,))

    def compile(self, schema: str) -> LLMatcher:
        """See `Grammars`."""
        return self._library.compile(grammar_source("json_schema", schema).text)

    def matcher(self, compiled: object) -> LlguidanceMatcher:
        """See `Grammars`."""
        assert isinstance(compiled, LLMatcher)
        return LlguidanceMatcher(compiled.deep_copy(), self._library.num_tokens)


def _suite(*, model_dir: str, eos_token_id: int) -> Suite:
    return Suite(LlguidanceGrammars(model_dir, eos_token_id), model_dir, eos_token_id)


if __name__ == "__main__":
    serve({"suite": _suite})
