from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from services.tokenizer.text.least_tokens import LeastTokens
from services.tokenizer.text.vocabulary import Vocabulary
from tests.support.tokenizer.many_tokenizers import ALL_NAMES, TEXTS, tokenizers


@pytest.mark.parametrize("name", ALL_NAMES)
@given(TEXTS | st.builds(lambda text, times: text * times, st.text("the fox1 .\n你é", max_size=4), st.integers(0, 30)))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = tokenizers()[name]
    assert LeastTokens(Vocabulary(tokenizer)).of(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("text", ["a", "1", "=", "aB1.!"])
def test_a_far_too_long_text_is_recognised(name: str, text: str) -> None:
    assert LeastTokens(Vocabulary(tokenizers()[name])).of(text * 100_000) > 5_000


def test_letters_missing_from_a_vocabulary_give_no_bound() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert LeastTokens(Vocabulary(tokenizer)).of("b" * 1000) == 0
