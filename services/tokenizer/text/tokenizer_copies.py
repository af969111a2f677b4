"""Copies of a tokenizer that share its model, which has all but some kilobytes of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer, models

# SentencePiece vocabularies mark the beginning of a text; a piece with other text before it must not be marked. This is
# how the setting is written in a tokenizer's JSON; it cannot occur inside a JSON string.
_MARKS_BEGINNING, _MARKS_NOTHING = '"prepend_scheme":"first"', '"prepend_scheme":"never"'


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a tokenizer has around its model."""

    model: models.Model
    stages: str
    """JSON of a tokenizer that has an empty model and no added tokens, and neither truncates nor pads."""
    added_tokens: tuple[AddedToken, ...]
    """In the order of their ids."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The parts of a tokenizer."""
        shell = Tokenizer(models.BPE())
        shell.normalizer, shell.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        shell.post_processor, shell.decoder = tokenizer.post_processor, tokenizer.decoder
        added = sorted(tokenizer.get_added_tokens_decoder().items(), key=lambda item: item[0])
        return cls(tokenizer.model, shell.to_str(), tuple(token for _, token in added))

    def assemble(self) -> Tokenizer:
        """A tokenizer of these parts."""
        tokenizer = Tokenizer.from_str(self.stages)
        tokenizer.model = self.model
        tokenizer.add_tokens(list(self.added_tokens))
        return tokenizer

    @property
    def marks_beginning(self) -> bool:
        """Whether the beginning of a text has a mark that later pieces do not have."""
        return _MARKS_BEGINNING in self.stages

    def without_marks(self) -> TokenizerParts:
        """The parts of a tokenizer of later pieces."""
        return dataclasses.replace(self, stages=self.stages.replace(_MARKS_BEGINNING, _MARKS_NOTHING))

    def describe(self) -> dict[str, Any]:
        """The stages as in tokenizer.json."""
        stages: dict[str, Any] = json.loads(self.stages)
        return stages
