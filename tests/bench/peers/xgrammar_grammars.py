"""xgrammar as a contestant, used as in vLLM; runs in the environment `XGRAMMAR`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xgrammar
from tokenizers import Tokenizer

from tests.bench.peers.grammar_contestant import Suite
from tests.bench.peers.protocol import serve


class XgrammarMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._words = torch.zeros((1, (num_tokens + 31) // 32), dtype=torch.int32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """See `Matcher`."""
        self._matcher.fill_next_token_bitmask(self._words)
        words: npt.NDArray[np.uint32] = self._words.numpy()[0].view(np.uint32)
        return words

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        self._matcher.accept_token(token_id)


class XgrammarGrammars:
    """See `Grammars`. Compilations are not cached, and run on one thread, as with the other library."""

    def __init__(self, model_dir: str, eos_token_id: int) -> None:
        tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        self._num_tokens: int = tokenizer.get_vocab_size()
        texts = [tokenizer.id_to_token(token_id) for token_id in range(self._num_tokens)]
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[eos_token_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> xgrammar.CompiledGrammar:
        """See `Grammars`. Properties that a schema does not name are allowed, as in the specification."""
        return self._compiler.compile_json_schema(schema, strict_mode=False)

    def matcher(self, compiled: object) -> XgrammarMatcher:
        """See `Grammars`."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(compiled), self._num_tokens)


def _suite(*, model_dir: str, eos_token_id: int) -> Suite:
    return Suite(XgrammarGrammars(model_dir, eos_token_id), model_dir, eos_token_id)


if __name__ == "__main__":
    serve({"suite": _suite})
