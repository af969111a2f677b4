"""A copy has everything that the tokenizer's JSON has, though the two share a model."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from services.tokenizer.text.tokenizer_copies import TokenizerParts
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.tokenizer.many_tokenizers import ALL_NAMES, tokenizers


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_copy_is_what_its_json_makes(name: str) -> None:
    tokenizer = tokenizers()[name]
    assert TokenizerParts.of(tokenizer).assemble().to_str() == Tokenizer.from_str(tokenizer.to_str()).to_str()


def test_tokens_that_are_added_out_of_order_keep_their_ids_and_flags() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[]))
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True, normalized=False), AddedToken("b", single_word=True)])
    tokenizer.add_special_tokens([AddedToken("<y>", rstrip=True), AddedToken("a")])
    copy = TokenizerParts.of(tokenizer).assemble()
    assert copy.to_str() == Tokenizer.from_str(tokenizer.to_str()).to_str() == tokenizer.to_str()


def test_a_copy_neither_truncates_nor_pads() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    ids = TokenizerParts.of(tokenizer).assemble().encode("The fox jumps over it.").ids
    assert ids == tiny_tokenizer().encode("The fox jumps over it.").ids
    assert 3 < len(ids) < 20


def test_tokens_of_a_copy_are_not_the_original_s() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer.to_str()
    TokenizerParts.of(tokenizer).assemble().add_tokens(["<another>"])
    assert tokenizer.to_str() == before


def test_marks_are_left_out_of_the_stages_alone() -> None:
    marked = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    source = json.loads(Tokenizer(models.BPE(vocab={'"prepend_scheme":"first"': 0}, merges=[])).to_str())
    parts = TokenizerParts.of(Tokenizer.from_str(json.dumps({**source, "pre_tokenizer": marked})))
    assert parts.marks_beginning
    copy = parts.without_marks()
    assert not copy.marks_beginning
    assert copy.describe()["pre_tokenizer"] == {**marked, "prepend_scheme": "never"}
    assert copy.assemble().get_vocab() == {'"prepend_scheme":"first"': 0}
