"""Follows sequences that have a grammar.

Threads compile grammars and compute masks while the device computes; the library releases the GIL. A mask takes about
20 µs, occasionally a millisecond.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from shared.request.grammar import GrammarError, GrammarLibrary

logger = logging.getLogger(__name__)

# Requests of one application share a grammar, as do a request's choices.
_MAX_COMPILED = 64
_NUM_THREADS = 2


class GrammarCompiler:
    """Makes matchers for one model. Its threads run as long as the process."""

    def __init__(self, model_dir: Path, logits_width: int, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer: a quarter of a second for 50,000 tokens.

        Masks have `logits_width` entries; tokens unknown to the tokenizer are never allowed.

        Raises:
            ModelDirectoryError: the tokenizer is missing or malformed.
        """
        self._library = GrammarLibrary(model_dir, eos_token_ids, logits_width)
        self._only_the_end = np.zeros(logits_width, np.bool_)
        self._only_the_end[list(eos_token_ids)] = True
        # Matchers at the beginning of a text, never advanced but copied, which takes 20 µs. Least recently used first.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[GrammarMatcher] = SimpleQueue()
        for number in range(_NUM_THREADS):
            threading.Thread(target=self._prepare_wanted, name=f"grammar-{number}", daemon=True).start()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of a text; compiles `grammar` (see `SamplingOptions.grammar`) on first use."""
        return GrammarMatcher(self, grammar)

    def begin(self, grammar: str) -> LLMatcher:
        """A new library matcher at the beginning of a text. From any thread.

        Raises:
            GrammarError: the library refuses the grammar.
        """
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = self._library.compile(grammar)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def mask(self, matcher: LLMatcher | None) -> npt.NDArray[np.bool_]:
        """The tokens that `matcher` allows, [logits_width]; without one, only end-of-sequence tokens."""
        if matcher is None:
            return self._only_the_end
        return self._library.allowed_tokens(matcher)

    def prepare(self, matcher: GrammarMatcher) -> None:
        """Queue the next mask for computation in another thread."""
        self._wanted.put(matcher)

    def _prepare_wanted(self) -> None:
        while True:
            self._wanted.get().mask()


class GrammarMatcher:
    """Follows one completion. Used by one thread; masks requested with `prepare` are computed in others."""

    def __init__(self, compiler: GrammarCompiler, grammar: str) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._mask: npt.NDArray[np.bool_] | None = None
        self._lock = threading.Lock()
        self.has_failed = False
        """Whether the text must end although the grammar does not allow it: no token fits, or parsing costs too much.
        Rare for a grammar that the tokenizer service has tried out.
        """

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, [logits_width]; read-only."""
        with self._lock:
            if self._mask is None:
                self._mask = self._compute_mask()
            return self._mask

    def advance(self, token_id: int) -> None:
        """Advance by the next token; after one that does not fit, only the end is allowed."""
        with self._lock:
            self._mask = None
            matcher = self._begun()
            if matcher is not None:
                matcher.consume_token(token_id)

    def prepare(self) -> None:
        """Start computing the next mask on another thread."""
        self._compiler.prepare(self)

    def _compute_mask(self) -> npt.NDArray[np.bool_]:
        matcher = self._begun()
        mask = self._compiler.mask(matcher)
        if matcher is not None and matcher.is_error():
            self._fail(matcher.stop_reason())
        elif not mask.any():
            # The tokenizer may know more tokens than the model.
            self._fail("the grammar requires a token that the model does not have")
            return self._compiler.mask(None)
        return mask

    def _begun(self) -> LLMatcher | None:
        """None if the grammar failed before the text began."""
        if self._matcher is None and not self.has_failed:
            try:
                self._matcher = self._compiler.begin(self._grammar)
            except GrammarError:
                # The tokenizer service compiled it with the same library, so the two services must differ.
                self._fail("the grammar does not compile")
        return self._matcher

    def _fail(self, cause: str) -> None:
        # Never log the library's message: it may quote the client's input.
        if not self.has_failed:
            logger.error("a grammar cannot be followed", extra={"cause": cause})
        self.has_failed = True
