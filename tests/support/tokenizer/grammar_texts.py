"""Random texts of a grammar, written token by token as a sampler would, and checks of texts against a grammar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from services.worker.sampling.grammar import GrammarCompiler, GrammarMatcher
from shared.model_files.model_dir import TOKENIZER, eos_token_ids

# Tokens that close strings, lists and objects; uniform draws would hardly ever finish a text.
CLOSERS = ('"', "}", "]", '"}', '"]', ",", ":", '":', "1", "0", ".", " ")


class TextWriter:
    """Writes texts with a model's vocabulary."""

    def __init__(self, model_dir: Path, logits_width: int) -> None:
        self.compiler = GrammarCompiler(model_dir, logits_width, eos_token_ids(model_dir))
        self.tokenizer = Tokenizer.from_file(str(model_dir / TOKENIZER))
        self._eos_token_ids = list(eos_token_ids(model_dir))
        ids = (self.tokenizer.token_to_id(text.replace(" ", "Ġ")) for text in CLOSERS)
        self._closers = np.array([token_id for token_id in ids if token_id is not None])

    def encode(self, text: str) -> list[int]:
        """The text's token ids."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def matcher_after(self, grammar: str, token_ids: list[int]) -> GrammarMatcher:
        """A matcher advanced by these tokens."""
        matcher = self.compiler.matcher(grammar)
        for token_id in token_ids:
            matcher.advance(token_id)
        return matcher

    def may_end(self, matcher: GrammarMatcher) -> bool:
        """Whether the text may end here."""
        return bool(matcher.mask()[self._eos_token_ids].all())

    def fits(self, grammar: str, text: str) -> bool:
        """Whether the grammar allows each of the text's tokens and then the end."""
        matcher = self.compiler.matcher(grammar)
        for token_id in self.encode(text):
            if not matcher.mask()[token_id]:
                return False
            matcher.advance(token_id)
        return self.may_end(matcher)

    def write(self, grammar: str, seed: int, *, max_tokens: int = 150) -> list[int] | None:
        """Draw the tokens of a complete text without EOS; None if it does not end within `max_tokens`."""
        random = np.random.default_rng(seed)
        matcher = self.compiler.matcher(grammar)
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            mask = matcher.mask().copy()
            assert mask.any(), "no token is allowed"
            if mask[self._eos_token_ids].any():
                mask[self._eos_token_ids] = False
                if not mask.any() or random.random() < 0.3:
                    return token_ids
            allowed = np.flatnonzero(mask)
            closers = self._closers[mask[self._closers]]
            token_id = int(random.choice(closers if len(closers) and random.random() < 0.7 else allowed))
            matcher.advance(token_id)
            token_ids.append(token_id)
        return None

    def decode(self, token_ids: list[int]) -> str:
        """The tokens' text."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
