from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from services.tokenizer.chat.conversation import Conversation, Message
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.text.control_tokens import ControlTokens
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.text_cuts import PART_LENGTH
from shared.errors import RequestTooLargeError
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.tiny_tokenizer import IM_END, IM_END_ID, IM_START, IM_START_ID, tiny_tokenizer
from tests.support.tokenizer.chat_templates import local_template


def tokenizer_with_bos(single: str = f"{IM_START} $A") -> Tokenizer:
    tokenizer = tiny_tokenizer()
    special_tokens = [(IM_START, IM_START_ID), (IM_END, IM_END_ID)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
    return tokenizer


def sentencepiece_tokenizer(*, is_legacy: bool) -> Tokenizer:
    """A vocabulary of characters that marks spaces and the beginning of text: of every piece, or only of the first."""
    characters = ["▁", *"abcs<>/[]"]
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(characters)}, merges=[]))
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("[b]", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("text", ["", "The fox", "12345 你好 😀\n\n"])
def test_ids_are_those_of_the_tokenizer(text: str) -> None:
    encoder = Encoder(tiny_tokenizer())
    token_ids = encoder.encode(text, add_special_tokens=True)
    assert token_ids.dtype == np.dtype("<i4")
    assert token_ids.tolist() == encoder.tokenizer.encode(text).ids
    assert encoder.decode(token_ids) == encoder.tokenizer.decode(token_ids.tolist())


def test_special_tokens_in_text_are_text() -> None:
    encoder = Encoder(tiny_tokenizer())
    token_ids = encoder.encode(f"a{IM_START}", add_special_tokens=True)
    assert IM_START_ID not in token_ids
    assert encoder.decode(token_ids) == f"a{IM_START}"


def test_the_given_tokenizer_is_not_modified() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer.to_str()
    encoder = Encoder(tokenizer)
    assert encoder.tokenizer.encode(IM_START).ids == [IM_START_ID]
    assert tokenizer.to_str() == before


async def test_plain_text_gets_the_tokenizers_special_tokens_and_a_conversation_does_not() -> None:
    encoder = Encoder(tokenizer_with_bos())
    prompts = PromptEncoder(encoder, local_template("{{ messages[0].content }}", {}))
    plain = tiny_tokenizer().encode("The fox").ids
    assert (await prompts.encode("The fox", 256)).tolist() == [IM_START_ID, *plain]
    assert (await prompts.encode(Conversation((Message("user", "The fox"),)), 256)).tolist() == plain


@pytest.mark.parametrize("text", ["", "The fox", "The fox jumps over the dog. " * 3000])
def test_special_tokens_around_a_text_are_added_once_however_long_it_is(text: str) -> None:
    tokenizer = tokenizer_with_bos(f"{IM_START} {IM_START} $A {IM_END}")
    parts = list(Encoder(tokenizer).encode_in_parts([text], add_special_tokens=True))
    assert np.concatenate(parts).tolist() == tokenizer.encode(text).ids
    assert all(len(part) < PART_LENGTH for part in parts)


def test_the_pieces_of_a_long_conversation_are_encoded_a_few_at_a_time() -> None:
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer)
    turn = f"{IM_START}user\nThe fox jumps over the dog.{IM_END}\n"
    pieces = list(encoder.control_tokens.cut(turn * 1000))
    parts = list(encoder.encode_in_parts(pieces))
    assert len(parts) > 2
    assert np.concatenate(parts).tolist() == tokenizer.encode(turn * 1000).ids


def test_text_is_not_truncated_where_the_tokenizer_would() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    encoder = Encoder(tokenizer)
    text = "The quick brown fox"
    assert encoder.encode(text, add_special_tokens=True).tolist() == tiny_tokenizer().encode(text).ids
    assert encoder.encode_pieces(["", text]).tolist() == tiny_tokenizer().encode(text).ids


@pytest.mark.parametrize("is_legacy", [True, False])
@pytest.mark.parametrize("text", ["a b<s>a b<s>", "<s>a<s> b", " a<s>", "a[b]c<s>[b]a[b]", "", "<s><s>"])
def test_a_text_in_pieces_marks_its_beginning_like_a_whole_one(text: str, is_legacy: bool) -> None:
    encoder = Encoder(sentencepiece_tokenizer(is_legacy=is_legacy))
    pieces = list(encoder.control_tokens.cut(text))
    expected = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.encode_pieces(pieces).tolist() == expected


def test_a_tokenizer_that_turns_text_into_special_tokens_is_refused() -> None:
    vocabulary = [("<unk>", 0.0), ("<s>", -1.0), ("<", -2.0), ("s", -2.0), (">", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    with pytest.raises(ModelDirectoryError, match="token 1, which is special"):
        Encoder(tokenizer)


def test_tokens_that_open_turns_are_kept_out_of_text_even_if_not_special() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<｜User｜>"), AddedToken("<think>")])
    encoder = Encoder(tokenizer)
    user, think = tokenizer.token_to_id("<｜User｜>"), tokenizer.token_to_id("<think>")
    token_ids = encoder.encode("<｜User｜><think>", add_special_tokens=False).tolist()
    assert (user in token_ids, think in token_ids) == (False, True)
    assert isinstance(encoder.control_tokens, ControlTokens)
    assert list(encoder.control_tokens.cut("<｜User｜><think>")) == ["", user, "<think>"]
    assert "<｜User｜>" not in encoder.special_tokens
    assert {"<｜User｜>", "<think>", IM_START} <= encoder.added_tokens.keys()


async def test_a_conversation_whose_rendered_text_is_too_large_is_refused() -> None:
    template = local_template("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", {})
    prompts = PromptEncoder(Encoder(tiny_tokenizer()), template)
    with pytest.raises(RequestTooLargeError):
        await prompts.encode(Conversation((Message("user", "x" * 2**21),)), 256)
