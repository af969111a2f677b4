from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from services.tokenizer.json.json_values import JsonValue
from services.tokenizer.text.control_tokens import ControlTokens, control_tokens_of, texts_in, unused_character

TOKENS = {
    7: AddedToken("<|a|>", special=True),
    8: AddedToken("<|ab|>", special=True, lstrip=True),
    9: AddedToken("|>x<|", special=True, rstrip=True),
}
CONTROL = ControlTokens(TOKENS)
TEXTS = [token.content for token in TOKENS.values()]
HOSTILE = st.lists(st.sampled_from([*TEXTS, "<|", "|>", "a", "b", "x", "<", " "]), max_size=8).map("".join)


def test_special_tokens_and_similarly_written_ones_are_control_tokens() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("[INST]", special=True)])
    tokenizer.add_tokens([AddedToken(text) for text in ("<think>", "<｜User｜>", "<|user|>", "\n\n", "<tool_call>")])
    contents = {token.content for token in control_tokens_of(tokenizer).values()}
    assert contents == {"<s>", "[INST]", "<｜User｜>", "<|user|>"}


@given(st.lists(HOSTILE, min_size=1, max_size=3))
def test_broken_texts_contain_no_control_token_however_they_are_joined(texts: list[str]) -> None:
    broken: list[str] = []
    for text in texts:
        value = CONTROL.broken(text, "\ue000")
        assert isinstance(value, str)
        broken.append(value)
    joined = "".join(broken)
    assert not any(token in joined for token in TEXTS)
    assert joined.replace("\ue000", "") == "".join(texts)


@given(HOSTILE)
def test_a_text_that_needs_no_breaking_is_unchanged(text: str) -> None:
    needs = CONTROL.occur_in([text])
    assert needs == (CONTROL.broken(text, "\ue000") != text)


def test_every_text_within_a_value_is_broken() -> None:
    value: JsonValue = {"<|a|>y": ["<|a|>y", {"b": "x<|a|>"}], "n": 1, "none": None, "yes": True}
    broken = CONTROL.broken(value, "_")
    # The last one ends with the beginning of another token.
    assert broken == {"<_|a|>y": ["<_|a|>y", {"b": "x<_|a|>_"}], "n": 1, "none": None, "yes": True}
    assert list(texts_in(value)) == ["<|a|>y", "<|a|>y", "b", "x<|a|>", "n", "none", "yes"]


def test_a_text_is_cut_at_control_tokens() -> None:
    assert list(CONTROL.cut("<|a|>hi <|a|><|a|>")) == ["", 7, "hi ", 7, "", 7, ""]
    assert list(CONTROL.cut("hi")) == ["hi"]


def test_a_token_absorbs_the_space_that_it_strips() -> None:
    assert list(CONTROL.cut(" x <|ab|> y |>x<| z")) == [" x", 8, " y ", 9, "z"]


def test_the_breaking_character_is_unused() -> None:
    assert unused_character(["abc"]) == "\ue000"
    private_use = "".join(map(chr, range(0xE000, 0xF900)))
    assert unused_character(["x", private_use]) == "\uf900"
