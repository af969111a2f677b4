"""The parts of a text have the tokens of the whole, for tokenizers of every known structure and texts of all kinds."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.tokenizer.text.text_cuts import PART_LENGTH, TextCutter
from services.tokenizer.text.tokenizer_copies import TokenizerParts
from services.tokenizer.text.vocabulary import Vocabulary
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.tokenizer.many_tokenizers import (
    ALL_NAMES,
    LLAMA_3,
    MARKING_NAMES,
    NAMES,
    TEXTS,
    byte_level,
    plain_bytes,
    split,
    tokenizers,
)


def cutter(tokenizer: Tokenizer, part_length: int = PART_LENGTH) -> TextCutter:
    return TextCutter(TokenizerParts.of(tokenizer), Vocabulary(tokenizer), part_length=part_length)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", ALL_NAMES)
@given(TEXTS)
@example("23[b] the")
@example("x\n\ny\nz")
@example("it's<think>ok</think>.")
def test_the_tokens_of_the_parts_are_those_of_the_text(name: str, text: str) -> None:
    tokenizer = tokenizers()[name]
    parts = list(cutter(tokenizer, part_length=1).parts(text))
    assert [token for part in parts for token in ids_of(tokenizer, part)] == ids_of(tokenizer, text)


CUTTABLE_TEXTS = ["The fox jumps. ", "if x:\n\treturn\n", "你好，世界。今天", "Привет, мир! ", "a,b,c,d\n"]  # noqa: RUF001


# GPT-2's own pre-tokenizer adds a space to each part that does not begin with one.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt-2"])
@pytest.mark.parametrize("text", CUTTABLE_TEXTS)
def test_a_text_of_any_language_is_cut_into_parts_not_much_longer_than_requested(name: str, text: str) -> None:
    parts = list(cutter(tokenizers()[name], part_length=100).parts(text * 100))
    assert len(parts) > 5
    assert all(100 <= len(part) < 150 for part in parts[:-1])


@pytest.mark.parametrize("name", ["gpt-2", *MARKING_NAMES])
def test_a_text_with_spaces_is_cut_before_them(name: str) -> None:
    parts = list(cutter(tokenizers()[name], part_length=100).parts("The fox jumps. " * 100))
    assert len(parts) > 5


def test_a_text_that_cannot_be_cut_stays_whole() -> None:
    assert list(cutter(tiny_tokenizer()).parts("a" * 300_000)) == ["a" * 300_000]


def test_a_cut_far_beyond_the_requested_length_is_found() -> None:
    text = "a" * (PART_LENGTH + 200_000) + " b"
    assert list(cutter(tiny_tokenizer()).parts(text)) == [text[:-2], " b"]


def with_added(**options: bool) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<x>", **options)])
    return tokenizer


def unknown_tokenizers() -> dict[str, Tokenizer]:
    lower_case = tiny_tokenizer()
    lower_case.normalizer = normalizers.Lowercase()
    two_words = tiny_tokenizer()
    two_words.add_tokens(["two words"])
    joins_words = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "a▁": 2}, merges=[("a", "▁")]))
    joins_words.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    unmarked = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, " ": 2, "a ": 3}, merges=[("a", " ")]))
    dropping = tiny_tokenizer()
    dropping.model.dropout = 0.1
    return {
        "another normalizer": lower_case,
        "another rule": byte_level(split(r"\w+ \w+"), plain_bytes()),
        "no rule": byte_level(plain_bytes()),
        "letters changed before the rule": byte_level(plain_bytes(), split(LLAMA_3)),
        "an added token takes the space after it": with_added(rstrip=True),
        "an added token takes the space before it": with_added(lstrip=True),
        "an added token is a word of its own": with_added(single_word=True),
        "an added token with a space": two_words,
        "a token across words": joins_words,
        "spaces are not marked": unmarked,
        "chance": dropping,
    }


@pytest.mark.parametrize("name", unknown_tokenizers())
def test_a_tokenizer_of_unknown_structure_gets_the_whole_text(name: str) -> None:
    tokenizer = unknown_tokenizers()[name]
    assert cutter(tokenizer).rule is None
    assert list(cutter(tokenizer, part_length=1).parts("The fox jumps.")) == ["The fox jumps."]
