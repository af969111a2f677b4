"""The text of a completion does not depend on how its ids are cut, and is what they add to the prompt's text.

Over real decoders: byte-level, byte fallback as in Llama 2, Metaspace, and WordPiece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.tokenizer.text.detokenizer import make_token_texts
from services.tokenizer.text.vocabulary import Vocabulary
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.tokenizer.many_tokenizers import UNMARK, llama_2_decoder, with_byte_tokens

REPLACEMENT = "\ufffd"
SPECIAL = "<s>"
PIECES = ["▁", "▁the", "▁blue", "sky", "e", "!", ",", " ", "你", "▁▁", "�"]


@cache
def ids_of_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens that are one byte."""
    vocabulary = tokenizer.get_vocab()
    if "<0x00>" in vocabulary:
        return {byte: vocabulary[f"<0x{byte:02X}>"] for byte in range(256)}
    return {data[0]: token_id for token_id, data in Vocabulary(tokenizer).bytes_of_id.items() if len(data) == 1}


@dataclass(frozen=True)
class Ids:
    """A tokenizer, and the ids of texts in it."""

    tokenizer: Tokenizer
    has_bytes: bool = True
    has_pieces: bool = True

    def ids_of(self, parts: list[str | int]) -> list[int]:
        """The ids of texts and bytes; a text that is no piece is spelled in bytes, or left out without any."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str) and not self.has_pieces:
                ids += self.tokenizer.encode(part).ids
            elif isinstance(part, str) and (token_id := self.tokenizer.token_to_id(part)) is not None:
                ids.append(token_id)
            elif self.has_bytes:
                ids += map(self._byte_id, bytes([part]) if isinstance(part, int) else part.encode())
        return ids

    def _byte_id(self, byte: int) -> int:
        return ids_of_bytes(self.tokenizer)[byte]

    def text_of(self, prompt: list[int], ids: list[int], lengths: list[int]) -> str:
        """The text after a prompt, for ids that come in pieces of these lengths."""
        detokenizer = make_token_texts(Vocabulary(self.tokenizer)).detokenizer(prompt)
        text, start = "", 0
        for length in [*lengths, len(ids)]:
            text += detokenizer.push(ids[start : start + length])
            start += length
        return text + detokenizer.flush()


def with_bytes(decoder: decoders.Decoder) -> Ids:
    return Ids(with_byte_tokens(decoder, PIECES))


def word_pieces() -> Ids:
    tokens = ["[UNK]", SPECIAL, "the", "##e", "blue", ",", "##!", "你", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.decoder = decoders.WordPiece()
    return Ids(tokenizer, has_bytes=False)


LLAMA_2 = with_bytes(llama_2_decoder())
GEMMA = with_bytes(decoders.Sequence(UNMARK))
METASPACE = with_bytes(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
BYTE_LEVEL = Ids(tiny_tokenizer(), has_pieces=False)
VOCABULARIES = {
    "Llama 2": LLAMA_2,
    "Gemma": GEMMA,
    "Metaspace": METASPACE,
    "byte-level": BYTE_LEVEL,
    "WordPiece": word_pieces(),
}
every_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)

# Joiners, flags, skin tones, combining marks, CJK in and beyond the basic plane.
CHARACTERS = ["😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301", "한", "你", "𠮷", "é", "\u200d", "\ufe0f"]
texts = st.sampled_from([*PIECES, *CHARACTERS, "##e", "blue", "do", "n't", SPECIAL])
anything: st.SearchStrategy[list[str | int]] = st.lists(texts | st.integers(0x80, 0xFF), max_size=20)
cuts = st.lists(st.integers(0, 7), max_size=30)


@every_vocabulary
@given(prompt=anything, parts=anything, lengths=cuts)
@example(prompt=["▁the"], parts=["😀", "😀", "😀"], lengths=[1] * 12)
def test_text_does_not_depend_on_how_ids_are_cut(
    vocabulary: Ids, prompt: list[str | int], parts: list[str | int], lengths: list[int]
) -> None:
    prompt_ids, ids = vocabulary.ids_of(prompt), vocabulary.ids_of(parts)
    whole = vocabulary.text_of(prompt_ids, ids, [])
    assert vocabulary.text_of(prompt_ids, ids, lengths) == whole
    assert vocabulary.text_of(prompt_ids, ids, [1] * len(ids)) == whole


@every_vocabulary
@given(prompt=st.lists(texts, min_size=1, max_size=80), parts=st.lists(texts, max_size=20), lengths=cuts)
@example(prompt=["▁the", "sky"], parts=["▁blue"], lengths=[])
@example(prompt=[SPECIAL], parts=["▁blue"], lengths=[])
@example(prompt=["▁the", SPECIAL], parts=["▁blue"], lengths=[])
@example(prompt=["😀"] * 30, parts=["▁blue"], lengths=[1])
def test_text_is_what_the_ids_add_to_the_prompts(
    vocabulary: Ids, prompt: list[str | int], parts: list[str | int], lengths: list[int]
) -> None:
    prompt_ids, ids = vocabulary.ids_of(prompt), vocabulary.ids_of(parts)
    decode = vocabulary.tokenizer.decode
    assert decode(prompt_ids) + vocabulary.text_of(prompt_ids, ids, lengths) == decode([*prompt_ids, *ids])


@pytest.mark.parametrize("vocabulary", [LLAMA_2, METASPACE, BYTE_LEVEL], ids=["Llama 2", "Metaspace", "byte-level"])
@pytest.mark.parametrize("num_in_prompt", [1, 2, 3])
def test_a_character_that_the_prompt_begins_is_completed(vocabulary: Ids, num_in_prompt: int) -> None:
    ids = vocabulary.ids_of([*"😀".encode(), "!"])
    prompt = [*vocabulary.ids_of(["▁the"]), *ids[:num_in_prompt]]
    assert vocabulary.text_of(prompt, ids[num_in_prompt:], [1, 1, 1]) == "😀!"


def test_a_character_is_shown_although_an_invalid_byte_follows() -> None:
    ids = LLAMA_2.ids_of(["▁the", "😀", 0xFF, 0xF0, 0x9F, "!"])
    detokenizer = make_token_texts(Vocabulary(LLAMA_2.tokenizer)).detokenizer(ids[:1])
    shown = ["", "", "", "😀", REPLACEMENT, "", "", 2 * REPLACEMENT + "!"]
    assert [detokenizer.push([i]) for i in ids[1:]] == shown
