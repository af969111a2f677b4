from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.tokenizer.text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, make_token_texts
from services.tokenizer.text.vocabulary import Vocabulary
from tests.support.models.tiny_tokenizer import IM_END_ID, VOCABULARY_SIZE, tiny_tokenizer
from tests.support.tokenizer.many_tokenizers import spell

TINY = tiny_tokenizer()
BYTES_TO_ID = {data: token_id for token_id, data in Vocabulary(TINY).bytes_of_id.items()}
REPLACEMENT = "\ufffd"

# Also ids beyond the vocabulary: logits may be wider than it.
token_id_lists = st.lists(st.integers(0, VOCABULARY_SIZE + 9), max_size=40)


def byte_id(byte: int) -> int:
    """The token that is one byte."""
    return BYTES_TO_ID[bytes([byte])]


def cut(items: list[int], lengths: list[int]) -> list[list[int]]:
    """The items in pieces of these lengths, with none skipped."""
    pieces, position = [], 0
    for length in lengths:
        pieces.append(items[position : position + length])
        position += length
    return [*pieces, items[position:]]


def detokenize(tokenizer: Tokenizer, pieces: list[list[int]], *, skips_special_tokens: bool = True) -> str:
    """The joined text of all pieces."""
    detokenizer = make_token_texts(Vocabulary(tokenizer)).detokenizer(skips_special_tokens=skips_special_tokens)
    return "".join([detokenizer.push(piece) for piece in pieces]) + detokenizer.flush()


@given(token_id_lists, st.lists(st.integers(0, 5), max_size=40))
@example([byte_id(0xF0), byte_id(0x9F), IM_END_ID, byte_id(0x98), byte_id(0x80)], [1, 1, 1, 1])
@example([byte_id(0xED), byte_id(0xA0), byte_id(0x80)], [1, 1])
def test_the_joined_pieces_equal_the_decoded_whole_however_they_were_cut(ids: list[int], lengths: list[int]) -> None:
    assert detokenize(TINY, cut(ids, lengths)) == TINY.decode(ids, skip_special_tokens=True)


@given(token_id_lists)
def test_special_tokens_have_their_text_unless_they_are_skipped(ids: list[int]) -> None:
    text = detokenize(TINY, [[i] for i in ids], skips_special_tokens=False)
    assert text == TINY.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=30))
def test_text_arrives_in_whole_characters(text: str) -> None:
    detokenizer = make_token_texts(Vocabulary(TINY)).detokenizer()
    shown = ""
    for token_id in TINY.encode(text).ids:
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


def test_a_character_is_shown_with_its_last_byte() -> None:
    detokenizer = make_token_texts(Vocabulary(TINY)).detokenizer()
    pieces = [detokenizer.push([byte_id(byte)]) for byte in "😀".encode()]
    assert pieces == ["", "", "", "😀"]


def test_endless_invalid_bytes_are_shown_as_they_arrive() -> None:
    detokenizer = make_token_texts(Vocabulary(TINY)).detokenizer()
    pieces = [detokenizer.push([byte_id(0x80)]) for _ in range(1000)]
    assert pieces == [REPLACEMENT] * 1000


def test_a_partial_character_is_shown_at_the_end() -> None:
    detokenizer = make_token_texts(Vocabulary(TINY)).detokenizer()
    assert detokenizer.push([byte_id(0xE4), byte_id(0xBD)]) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_added_tokens_are_shown_and_special_ones_are_not() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool 你>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<secret>", special=True)])
    ids = tokenizer.encode("a<tool 你><secret>b").ids
    assert detokenize(tokenizer, [[i] for i in ids]) == tokenizer.decode(ids) == "a<tool 你>b"


@pytest.fixture
def sentencepiece() -> Tokenizer:
    """A tokenizer of Llama 2's kind: spaces are ▁, unknown characters are byte tokens."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "!", "▁"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_the_kind_of_vocabulary_determines_the_detokenizer(sentencepiece: Tokenizer) -> None:
    assert isinstance(make_token_texts(Vocabulary(TINY)).detokenizer(), ByteLevelDetokenizer)
    assert isinstance(make_token_texts(Vocabulary(sentencepiece)).detokenizer(), WindowDetokenizer)


def test_a_window_decodes_pieces_and_bytes_like_the_whole(sentencepiece: Tokenizer) -> None:
    pieces = ("<s>", "▁hello", "▁world", "!", "▁", "😀", "é", "▁hello", "<s>", "<s>", "▁world", "你", "好")
    ids = spell(sentencepiece, *pieces * 20)
    assert detokenize(sentencepiece, [[i] for i in ids]) == sentencepiece.decode(ids)
    assert detokenize(sentencepiece, [ids]) == sentencepiece.decode(ids)


def test_a_window_shows_no_half_character(sentencepiece: Tokenizer) -> None:
    detokenizer = make_token_texts(Vocabulary(sentencepiece)).detokenizer()
    ids = spell(sentencepiece, "▁hello", "😀")
    assert [detokenizer.push([i]) for i in ids] == ["hello", "", "", "", "😀"]


def test_a_window_of_invalid_bytes_stays_bounded(sentencepiece: Tokenizer) -> None:
    detokenizer = make_token_texts(Vocabulary(sentencepiece)).detokenizer()
    shown = "".join(detokenizer.push([1 + 0x80]) for _ in range(1000))
    assert len(shown) > 900
    assert shown + detokenizer.flush() == REPLACEMENT * 1000


def test_a_window_shows_special_tokens_unless_they_are_skipped(sentencepiece: Tokenizer) -> None:
    ids = spell(sentencepiece, "<s>", "▁hello", "<s>", "😀", "▁world", "<s>")
    text = detokenize(sentencepiece, [[i] for i in ids], skips_special_tokens=False)
    assert text == sentencepiece.decode(ids, skip_special_tokens=False)


def test_a_single_token_has_bytes() -> None:
    texts = make_token_texts(Vocabulary(TINY))
    assert texts.bytes_of(BYTES_TO_ID[b" the"]) == b" the"
    assert texts.bytes_of(byte_id(0xF0)) == b"\xf0"
    assert texts.bytes_of(IM_END_ID) == b"<|im_end|>"
    assert texts.bytes_of(VOCABULARY_SIZE) == b""


def test_a_single_piece_has_bytes_including_its_space(sentencepiece: Tokenizer) -> None:
    texts = make_token_texts(Vocabulary(sentencepiece))
    ids = spell(sentencepiece, "▁hello", "!", "<s>", "é")
    assert [texts.bytes_of(i) for i in ids] == [b" hello", b"!", b"<s>", b"\xc3", b"\xa9"]
    assert texts.bytes_of(1 + ord("A")) == b"A"
    assert texts.bytes_of(10_000) == b""
