from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from services.tokenizer.text.vocabulary import Vocabulary
from tests.support.tokenizer.many_tokenizers import ALL_NAMES, tokenizers


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's own function, https://github.com/openai/gpt-2/blob/master/src/encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = list(printable)
    for byte in range(256):
        if byte not in printable:
            printable.append(byte)
            characters.append(256 + len(characters) - 188)
    return dict(zip(printable, map(chr, characters), strict=True))


BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def expected_bytes(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


@pytest.mark.parametrize("name", ALL_NAMES)
def test_products_are_those_of_the_library_s_vocabulary(name: str) -> None:
    tokenizer = tokenizers()[name]
    vocabulary, tokens = Vocabulary(tokenizer), tokenizer.get_vocab(with_added_tokens=True)
    assert vocabulary.token_to_id == tokens
    assert vocabulary.model_token_to_id == tokenizer.get_vocab(with_added_tokens=False)
    assert vocabulary.longest_bytes == max(len(token.encode()) for token in tokens)
    assert vocabulary.bytes_of_id == {token_id: expected_bytes(token) for token, token_id in tokens.items()}


# Characters of bytes, the first beyond them, and others in which a token is UTF-8.
@given(st.sets(st.text(st.sampled_from([*BYTE_OF, "\u0143", "\u0144", " ", "\n", "\xad", "你", "😀"]), min_size=1)))
def test_bytes_are_those_of_the_characters_or_utf_8(tokens: set[str]) -> None:
    vocab = {token: token_id for token_id, token in enumerate(sorted(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.add_tokens([AddedToken("<added>")])
    expected = {token_id: expected_bytes(token) for token, token_id in vocab.items()}
    assert Vocabulary(tokenizer).bytes_of_id == expected | {len(vocab): b"<added>"}


def test_an_added_token_that_the_model_has_is_its_own_too() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_tokens(["b", "c"])
    assert Vocabulary(tokenizer).model_token_to_id == {"a": 0, "b": 1}
    assert Vocabulary(tokenizer).token_to_id == {"a": 0, "b": 1, "c": 2}
