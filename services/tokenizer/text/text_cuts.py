"""Where a text may be cut so that the tokens of its parts, joined, are those of the whole.

That is known of tokenizers by their structure: what finds the words of a text is one of the well-known rules, and no
word of them goes across the cut. A tokenizer of any other structure gets the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

# A part has at least so many characters.
PART_LENGTH = 16 * 1024
# Looking for a cut keeps the interpreter's lock: no more at a time.
_WINDOW_LENGTH = 64 * 1024

_SPACE_MARK = "▁"

# The rules by which tokenizers find words; GPT-2's is built into `ByteLevel`. All of them agree in this: no word goes
# on from anything but space to a space, from letters to punctuation other than an apostrophe, or from a single line
# end, after anything but space, to a letter. None looks at what comes before its word, and only those of runs of space
# look at what comes after it.
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
        # Mistral's newer ones.
        _CASED_WORDS % ("", "") + r"|\p{N}|" + _REST_WITH_SLASHES,
        # DeepSeek V3.
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Rules that take runs of digits, or of Chinese and Japanese letters, out of a text first.
_RUN_RULES = frozenset({r"\p{N}{1,3}", r"\p{N}", "[0-9]", "[一-龥぀-ゟ゠-ヿ]+"})  # noqa: RUF001

# Letters by any version of Unicode, which no normalisation changes.
_LETTERS = "A-Za-zА-Яа-я一-龥ぁ-ゖァ-ヺ가-힣"  # noqa: RUF001
_PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~，。、；：！？'  # noqa: RUF001


class CutRule(NamedTuple):
    """Where texts may be cut, and whether the space that then begins the next part is left out of it.

    That is so where the tokenizer itself puts one before every text.
    """

    pattern: re.Pattern[str]
    drops_space: bool = False


class TextCutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, part_length: int = PART_LENGTH) -> None:
        """Take a tokenizer that neither truncates nor pads; parts have at least `part_length` characters."""
        self.rule = find_cut_rule(json.loads(tokenizer.to_str()))
        self._part_length = part_length

    def parts(self, text: str) -> Iterator[str]:
        """The parts of a text, in order, at least one; a part ends at the first cut after its least length."""
        start = 0
        while self.rule is not None and (cut := self._next_cut(self.rule.pattern, text, start)) < len(text):
            yield text[start:cut]
            start = cut + self.rule.drops_space
        yield text[start:]

    def _next_cut(self, pattern: re.Pattern[str], text: str, start: int) -> int:
        """Where the part that begins at `start` ends."""
        position = start + self._part_length
        while position < len(text):
            if match := pattern.search(text, position, position + _WINDOW_LENGTH):
                return match.start()
            # A rule looks at two characters after a cut, and sees none after the window.
            position += _WINDOW_LENGTH - 2
        return len(text)


def find_cut_rule(tokenizer: dict[str, Any]) -> CutRule | None:
    """Where a tokenizer, by its JSON, lets texts be cut; None if its structure is not a known one."""
    added, model = tokenizer["added_tokens"], tokenizer["model"]
    if not all(_leaves_cuts_alone(token) for token in added) or model.get("dropout"):
        return None
    contents = [token["content"] for token in added]
    normalizers = _flat(tokenizer["normalizer"], "normalizers")
    stages = _flat(tokenizer["pre_tokenizer"], "pretokenizers")
    if all(step["type"] == "NFC" for step in normalizers) and _finds_words(stages):
        return _between_words(contents, adds_space=any(stage.get("add_prefix_space") for stage in stages))
    if _marks_spaces(normalizers, stages) and _keeps_words_apart(model):
        return _before_marks(contents, prepends=any(step["type"] == "Prepend" for step in normalizers))
    return None


def _flat(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in order; none for None."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for member in step[members] for inner in _flat(member, members)]


def _leaves_cuts_alone(token: dict[str, Any]) -> bool:
    """Whether an added token is found whatever stands around it, and no cut at a space goes through it."""
    is_found_alike = token["special"] or not (token["lstrip"] or token["rstrip"] or token["single_word"])
    content = token["content"].replace(_SPACE_MARK, " ")
    return is_found_alike and (content.isspace() or not re.search(r"\s", content))


def _finds_words(stages: list[dict[str, Any]]) -> bool:
    """Whether the stages find words by known rules, and do nothing else before `ByteLevel`, which changes letters."""
    is_byte_level = [stage["type"] == "ByteLevel" for stage in stages]
    has_known_order = not any(is_byte_level[:-1])
    return has_known_order and all(map(_is_known, stages)) and any(map(_is_word_rule, stages))


def _is_known(stage: dict[str, Any]) -> bool:
    return stage["type"] in ("Digits", "ByteLevel") or _split_rule(stage) in _WORD_RULES | _RUN_RULES


def _is_word_rule(stage: dict[str, Any]) -> bool:
    return bool(stage["use_regex"]) if stage["type"] == "ByteLevel" else _split_rule(stage) in _WORD_RULES


def _split_rule(stage: dict[str, Any]) -> str | None:
    """The regular expression whose matches a stage makes words of their own; None for another kind of stage."""
    if stage["type"] != "Split" or stage["behavior"] != "Isolated" or stage["invert"]:
        return None
    rule: str = stage["pattern"].get("Regex", "")
    # Some files have the characters themselves.
    return rule.replace("\r", r"\r").replace("\n", r"\n")


def _between_words(added: list[str], *, adds_space: bool) -> CutRule:
    before_space = r"(?<=\S)(?= )"
    if adds_space:
        # A part that does not begin with one would be given one.
        return CutRule(re.compile(before_space))
    # No cut goes through an added token.
    inner = {character for content in added for character in content[1:]}
    punctuation = re.escape("".join(sorted(set(_PUNCTUATION) - inner)))
    before_punctuation = f"(?<=[{_LETTERS}])(?=[{punctuation}])"
    return CutRule(re.compile(rf"{before_space}|{before_punctuation}|(?<=\S\n)(?=[{_LETTERS}])"))


def _marks_spaces(normalizers: list[dict[str, Any]], stages: list[dict[str, Any]]) -> bool:
    """Whether a tokenizer, in the way of SentencePiece, puts a mark in each space's place, and does nothing else."""
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    prepends = {"type": "Prepend", "prepend": _SPACE_MARK}
    marks = [stage["type"] == "Metaspace" and stage["replacement"] == _SPACE_MARK for stage in stages]
    return (
        all(marks) and (any(marks) or replaces in normalizers) and all(s in (replaces, prepends) for s in normalizers)
    )


def _keeps_words_apart(model: dict[str, Any]) -> bool:
    """Whether a model that gets a text in one, spaces marked, makes no token of the end of one word and the next."""
    if model["type"] != "BPE" or _SPACE_MARK not in model["vocab"]:
        return False
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    return not any(_SPACE_MARK in token.lstrip(_SPACE_MARK) for token in model["vocab"])


def _before_marks(added: list[str], *, prepends: bool) -> CutRule | None:
    if not prepends:
        return CutRule(re.compile(rf"(?<=[^\s{_SPACE_MARK}])(?= )"))
    # The tokenizer begins each text with a mark, which is that of the space left out: one between two texts, no added
    # token before or after it.
    if any(re.match("[A-Za-z]", content) for content in added):
        return None
    ends = re.escape("".join(sorted({content[-1] for content in added})))
    return CutRule(re.compile(rf"(?<=[^\s{_SPACE_MARK}{ends}])(?= [A-Za-z])"), drops_space=True)
