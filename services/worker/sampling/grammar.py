"""Follows the texts of sequences that have a grammar: which tokens may come next.

Compiling and masks are done ahead in threads, while the device computes; the library lets go of the interpreter
meanwhile. A mask takes some 20 µs, now and then a millisecond.
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

from shared.grammar import GrammarError, GrammarLibrary

logger = logging.getLogger(__name__)

# Requests of one application share a grammar, and so do the choices of a request.
_MAX_COMPILED = 64
_NUM_THREADS = 2


class GrammarCompiler:
    """Makes matchers for one model. Its threads live as long as the process."""

    def __init__(self, model_dir: Path, logits_width: int, eos_token_ids: Sequence[int]) -> None:
        """Read the model's tokenizer: a quarter of a second for 50,000 tokens.

        Args:
            model_dir: The model's directory.
            logits_width: Tokens of each mask. Those that the tokenizer does not know are never allowed.
            eos_token_ids: What ends a text.

        Raises:
            ModelDirectoryError: the tokenizer is missing or malformed.
        """
        self._library = GrammarLibrary(model_dir, eos_token_ids, logits_width)
        self._only_the_end = np.zeros(logits_width, np.bool_)
        self._only_the_end[list(eos_token_ids)] = True
        # At the beginning of their text, and never advanced: a copy takes 20 µs. The least recently used one is first.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[GrammarMatcher] = SimpleQueue()
        for number in range(_NUM_THREADS):
            threading.Thread(target=self._prepare_wanted, name=f"grammar-{number}", daemon=True).start()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Follow a grammar from the beginning of a text. It is compiled when that is first needed.

        Args:
            grammar: In the library's form; see `SamplingOptions.grammar`.
        """
        return GrammarMatcher(self, grammar)

    def begin(self, grammar: str) -> LLMatcher:
        """The library's matcher, at the beginning of a text.

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
        """What `matcher` allows, [logits_width]; without one, only the end."""
        if matcher is None:
            return self._only_the_end
        return self._library.allowed_tokens(matcher)

    def prepare(self, matcher: GrammarMatcher) -> None:
        """Have its mask computed soon, in another thread."""
        self._wanted.put(matcher)

    def _prepare_wanted(self) -> None:
        while True:
            self._wanted.get().mask()


class GrammarMatcher:
    """Follows one sequence's completion.

    One thread uses it; masks that were asked for ahead are computed in others.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: str) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._mask: npt.NDArray[np.bool_] | None = None
        self._lock = threading.Lock()
        self.has_failed = False
        """Whether the text had to end before the grammar let it: nothing fits behind it, or its parsing costs more
        than is allowed. A grammar that the tokenizer service has tried hardly ever comes to that."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, [logits_width]; not to be written.

        End-of-sequence tokens may where the text may end, and they alone once it has ended or failed.
        """
        with self._lock:
            if self._mask is None:
                self._mask = self._compute_mask()
            return self._mask

    def advance(self, token_id: int) -> None:
        """Take in the completion's next token. Behind one that does not fit, only the end is allowed."""
        with self._lock:
            self._mask = None
            matcher = self._begun()
            if matcher is not None:
                matcher.consume_token(token_id)

    def prepare(self) -> None:
        """Start to compute the next mask."""
        self._compiler.prepare(self)

    def _compute_mask(self) -> npt.NDArray[np.bool_]:
        matcher = self._begun()
        mask = self._compiler.mask(matcher)
        if matcher is not None and matcher.is_error():
            self._fail(matcher.stop_reason())
        elif not mask.any():
            # The tokenizer may know more tokens than the model.
            self._fail("it needs a token that the model does not have")
            return self._compiler.mask(None)
        return mask

    def _begun(self) -> LLMatcher | None:
        """The library's matcher; None when the grammar has failed before the text began."""
        if self._matcher is None and not self.has_failed:
            try:
                self._matcher = self._compiler.begin(self._grammar)
            except GrammarError:
                # It was compiled once before it came here, with the same library: the two differ.
                self._fail("it does not compile")
        return self._matcher

    def _fail(self, cause: str) -> None:
        # Never the library's message: it may quote what the client sent.
        if not self.has_failed:
            logger.error("a grammar cannot be followed", extra={"cause": cause})
        self.has_failed = True
