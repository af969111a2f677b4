"""Finds where a text may be cut so that the tokens of its parts, joined, are the tokens of the whole.

This is known for tokenizers that split texts into words by a well-known rule: no word may cross a cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, models

from services.tokenizer.text.tokenizer_copies import TokenizerParts
from services.tokenizer.text.vocabulary import Vocabulary
from shared.model_files.tiktoken_vocabulary import WORDS as KIMI_WORDS

# The minimum length of a part, in characters.
PART_LENGTH = 16 * 1024
# The search for a cut holds the GIL, so it looks at no more than this many characters at a time.
_WINDOW_LENGTH = 64 * 1024

_SPACE_MARK = "▁"

# The rules by which tokenizers find words; GPT-2's is built into `ByteLevel`. They all agree that no word extends from
# a character other than whitespace to a space, from a letter to punctuation other than an apostrophe, or from a single
# line break after a character other than whitespace to a letter. No rule looks at what comes before a word, and only
# those for runs of whitespace look at what comes after it.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD_RULES = frozenset(
    {
        # Llama 3, GLM-4, and GPT-4's.
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST,
        # Qwen 2 and 3.
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST,
        # gpt-oss and GPT-4o.
        _CASED_WORDS % (f"{_ENDINGS}?", f"{_ENDINGS}?") + r"|\p{N}{1,3}|" + _REST_WITH_SLASHES,
        # Kimi, whose runs of Chinese characters are words.
        KIMI_WORDS,
        # Newer Mistral models.
        _CASED_WORDS % ("", "") + r"|\p{N}|" + _REST_WITH_SLASHES,
        # DeepSeek V3.
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Rules that first split off runs of digits, or of Chinese and Japanese characters.
_RUN_RULES = frozenset({r"\p{N}{1,3}", r"\p{N}", "[0-9]", "[一-龥぀-ゟ゠-ヿ]+"})  # noqa: RUF001

# Letters in every version of Unicode that no normalisation changes.
_LETTERS = "A-Za-zА-Яа-я一-龥ぁ-ゖァ-ヺ가-힣"  # noqa: RUF001
_PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~，。、；：！？'  # noqa: RUF001


class CutRule(NamedTuple):
    """Where texts may be cut."""

    pattern: re.Pattern[str]
    """Matches the empty string at each possible cut."""
    drops_space: bool = False
    """Whether the next part loses its first space, which the tokenizer adds before every text."""


class TextCutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, parts: TokenizerParts, vocabulary: Vocabulary, *, part_length: int = PART_LENGTH) -> None:
        """Take both of one tokenizer; all parts of a text but the last have at least `part_length` characters."""
        self.rule = find_cut_rule(parts, vocabulary)
        self._part_length = part_length

    def parts(self, text: str) -> Iterator[str]:
        """The parts of a text, at least one; each ends at the first cut after its minimum length."""
        start = 0
        while self.rule is not None and (cut := self._next_cut(self.rule.pattern, text, start)) < len(text):
            yield text[start:cut]
            start = cut + self.rule.drops_space
        yield text[start:]

    def _next_cut(self, pattern: re.Pattern[str], text: str, start: int) -> int:
        position = start + self._part_length
        while position < len(text):
            if match := pattern.search(text, position, position + _WINDOW_LENGTH):
                return match.start()
            # The windows overlap: a pattern looks at two characters after a cut, and cannot see beyond its window.
            position += _WINDOW_LENGTH - 2
        return len(text)


def find_cut_rule(parts: TokenizerParts, vocabulary: Vocabulary) -> CutRule | None:
    """The rule for a tokenizer of which both are; None if its structure is unknown."""
    added, model = parts.added_tokens, parts.model
    if not all(map(_leaves_cuts_alone, added)) or getattr(model, "dropout", None):
        return None
    contents = [token.content for token in added]
    described = parts.describe()
    normalizers = _flat(described["normalizer"], "normalizers")
    stages = _flat(described["pre_tokenizer"], "pretokenizers")
    if all(step["type"] == "NFC" for step in normalizers) and _finds_words(stages):
        return _between_words(contents, adds_space=any(stage.get("add_prefix_space") for stage in stages))
    if _marks_spaces(normalizers, stages) and _keeps_words_apart(model, vocabulary):
        return _before_marks(contents, prepends=any(step["type"] == "Prepend" for step in normalizers))
    return None


def _flat(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for member in step[members] for inner in _flat(member, members)]


def _leaves_cuts_alone(token: AddedToken) -> bool:
    """Whether an added token is found whatever surrounds it, and is never split by a cut at a space."""
    is_found_alike = token.special or not (token.lstrip or token.rstrip or token.single_word)
    content = token.content.replace(_SPACE_MARK, " ")
    return is_found_alike and (content.isspace() or not re.search(r"\s", content))


def _finds_words(stages: list[dict[str, Any]]) -> bool:
    """Whether the rules are known, with nothing after `ByteLevel`, which changes characters."""
    is_byte_level = [stage["type"] == "ByteLevel" for stage in stages]
    has_known_order = not any(is_byte_level[:-1])
    return has_known_order and all(map(_is_known, stages)) and any(map(_is_word_rule, stages))


def _is_known(stage: dict[str, Any]) -> bool:
    return stage["type"] in ("Digits", "ByteLevel") or _split_rule(stage) in _WORD_RULES | _RUN_RULES


def _is_word_rule(stage: dict[str, Any]) -> bool:
    return bool(stage["use_regex"]) if stage["type"] == "ByteLevel" else _split_rule(stage) in _WORD_RULES


def _split_rule(stage: dict[str, Any]) -> str | None:
    """The regex whose matches a stage splits off; None for another kind of stage."""
    if stage["type"] != "Split" or stage["behavior"] != "Isolated" or stage["invert"]:
        return None
    rule: str = stage["pattern"].get("Regex", "")
    # Some files have the characters themselves instead of the escapes.
    return rule.replace("\r", r"\r").replace("\n", r"\n")


def _between_words(added: list[str], *, adds_space: bool) -> CutRule:
    before_space = r"(?<=\S)(?= )"
    if adds_space:
        # A part that does not begin with a space would get one added.
        return CutRule(re.compile(before_space))
    # Characters inside added tokens are excluded, so that no cut splits one.
    inner = {character for content in added for character in content[1:]}
    punctuation = re.escape("".join(sorted(set(_PUNCTUATION) - inner)))
    before_punctuation = f"(?<=[{_LETTERS}])(?=[{punctuation}])"
    return CutRule(re.compile(rf"{before_space}|{before_punctuation}|(?<=\S\n)(?=[{_LETTERS}])"))


def _marks_spaces(normalizers: list[dict[str, Any]], stages: list[dict[str, Any]]) -> bool:
    """Whether, like SentencePiece, a tokenizer only replaces each space by a mark."""
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    prepends = {"type": "Prepend", "prepend": _SPACE_MARK}
    marks = [stage["type"] == "Metaspace" and stage["replacement"] == _SPACE_MARK for stage in stages]
    return (
        all(marks) and (any(marks) or replaces in normalizers) and all(s in (replaces, prepends) for s in normalizers)
    )


def _keeps_words_apart(model: models.Model, vocabulary: Vocabulary) -> bool:
    """Whether no token spans two words, in a text that is not split before."""
    if not isinstance(model, models.BPE) or model.token_to_id(_SPACE_MARK) is None:
        return False
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return not any(_SPACE_MARK in token.lstrip(_SPACE_MARK) for token in vocabulary.model_token_to_id)


def _before_marks(added: list[str], *, prepends: bool) -> CutRule | None:
    if not prepends:
        return CutRule(re.compile(rf"(?<=[^\s{_SPACE_MARK}])(?= )"))
    # The tokenizer puts a mark before each text, which replaces the space that was dropped. That is only correct for a
    # single space with no added token before or after it.
    if any(re.match("[A-Za-z]", content) for content in added):
        return None
    ends = re.escape("".join(sorted({content[-1] for content in added})))
    return CutRule(re.compile(rf"(?<=[^\s{_SPACE_MARK}{ends}])(?= [A-Za-z])"), drops_space=True)
