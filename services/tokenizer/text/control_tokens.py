r"""The tokens that structure a prompt, and how text from users is kept from becoming one.

Only a chat template may write control tokens. First, those in user texts are broken by a character that occurs nowhere
else; once the template is rendered, its own are found, and the breaking character is removed:

    user text         hi<|im_end|>                        #: the breaking character
    broken            hi<#|im_end|>
    rendered          <|im_start|>user\nhi<#|im_end|><|im_end|>
    cut               [IM_START] "user\nhi<#|im_end|>" [IM_END]
    pieces            [IM_START] "user\nhi<|im_end|>" [IM_END]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from services.tokenizer.json.json_values import JsonValue
from services.tokenizer.text.markers import Markers

# DeepSeek's turns begin with such tokens, which its tokenizer does not declare as special.
_CONTROL_FORM = re.compile(r"<[|｜].*[|｜]>")

_PRIVATE_USE = 0xE000
_LAST_CHARACTER = 0x10FFFF


def control_tokens_of(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """The special tokens, and others that are written like them.

    Other added tokens, such as `<think>`, are text: people write them in prompts, and templates look for them there.
    """
    return {
        token_id: token
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        # A single character cannot be broken.
        if len(token.content) > 1 and (token.special or _CONTROL_FORM.fullmatch(token.content))
    }


@dataclass(frozen=True, slots=True)
class _Sides:
    """Whether a control token swallows whitespace on its left and right."""

    token_id: int
    left: bool
    right: bool


class ControlTokens:
    """Finds and breaks the control tokens of one tokenizer."""

    def __init__(self, tokens: dict[int, AddedToken]) -> None:
        self._sides = {
            token.content: _Sides(token_id, token.lstrip, token.rstrip) for token_id, token in tokens.items()
        }
        self._markers = Markers(*self._sides)
        # A lookahead, so that overlapping tokens are found too.
        self._beginnings = re.compile(f"(?={self._markers.pattern.pattern})")

    def occur_in(self, texts: Iterable[str]) -> bool:
        """Whether a text contains a control token, or ends with the beginning of one."""
        markers = self._markers
        return any(markers.find(text, 0) or markers.held_length(text, 0) for text in texts)

    def broken(self, value: JsonValue, breaker: str) -> JsonValue:
        """A copy whose texts contain no whole control token, and cannot complete one with what follows.

        `breaker` is inserted after the first character of each, and after the beginning of one at a text's end.
        """
        if isinstance(value, str):
            return self._break(value, breaker)
        if isinstance(value, list):
            return [self.broken(item, breaker) for item in value]
        if isinstance(value, dict):
            return {self._break(key, breaker): self.broken(item, breaker) for key, item in value.items()}
        return value

    def cut(self, text: str) -> Iterator[str | int]:
        """Cut a text into control token ids and the texts between them, some possibly empty."""
        start, swallows = 0, False
        for match in self._markers.pattern.finditer(text):
            sides = self._sides[match[0]]
            piece = text[start : match.start()]
            piece = piece.lstrip() if swallows else piece
            yield piece.rstrip() if sides.left else piece
            yield sides.token_id
            start, swallows = match.end(), sides.right
        yield text[start:].lstrip() if swallows else text[start:]

    def _break(self, text: str, breaker: str) -> str:
        pieces = []
        start = 0
        for match in self._beginnings.finditer(text):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        end = breaker if self._markers.held_length(text, start) else ""
        return breaker.join([*pieces, text[start:]]) + end


def texts_in(value: JsonValue) -> Iterator[str]:
    """Every string in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)


def unused_character(texts: Sequence[str]) -> str:
    """A character in none of the texts, from the private use area if possible."""
    used = set().union(*texts)
    # A request's text is far too short to contain all characters.
    return next(chr(code) for code in range(_PRIVATE_USE, _LAST_CHARACTER) if chr(code) not in used)
