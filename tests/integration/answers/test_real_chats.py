"""Conversations with the real model's tokenizer and template, against `transformers`."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from services.tokenizer.chat.chat_encoding import render_chat
from services.tokenizer.chat.chat_template import ChatTemplate, load_chat_template
from services.tokenizer.chat.conversation import Conversation, Message
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.model_tokenizer import load_tokenizer
from services.tokenizer.text.text_cuts import TextCutter
from services.tokenizer.text.tokenizer_copies import TokenizerParts
from tests.support.tokenizer.many_tokenizers import TEXTS as ODD_TEXTS

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<jupyter_output>"]


class Real:
    """The real model's encoder and template, and `transformers`' tokenizer of the same directory."""

    def __init__(self, directory: Path) -> None:
        tokenizer = load_tokenizer(directory)
        template = load_chat_template(tokenizer, timeout_s=60.0)
        assert template is not None
        self.template: ChatTemplate = template
        self.encoder = Encoder(tokenizer.backend)
        # It reads the whole vocabulary, so that one cuts all texts.
        self.cutter = TextCutter(TokenizerParts.of(tokenizer.backend), self.encoder.vocabulary, part_length=1)
        self.reference: Any = AutoTokenizer.from_pretrained(directory)

    def encode(self, messages: list[Message]) -> list[int]:
        rendered = render_chat(self.template, self.encoder.control_tokens, Conversation(tuple(messages)))
        token_ids: list[int] = self.encoder.encode_pieces(rendered.pieces).tolist()
        return token_ids

    def control_ids(self, messages: list[Message]) -> list[int]:
        token_of = self.encoder.tokenizer.get_added_tokens_decoder()
        return [token_id for token_id in self.encode(messages) if token_id in token_of]


@pytest.fixture(scope="module")
def real(real_model: Path) -> Real:
    return Real(real_model)


ROLES = st.sampled_from(["system", "user", "assistant"])
TEXTS = st.lists(st.text(max_size=20) | st.sampled_from(["<|", "<|im_", "|>", "\n\n", "  ", "123"]), max_size=4).map(
    "".join
)
HARMLESS = TEXTS.filter(lambda text: not any(token in text for token in SPECIAL))


@given(st.lists(st.builds(Message, ROLES, HARMLESS), min_size=1, max_size=4))
def test_the_ids_of_a_harmless_chat_equal_those_of_transformers(real: Real, messages: list[Message]) -> None:
    # Leading system messages are one, by every API.
    opening = list(takewhile(lambda message: message.role == "system", messages))
    texts = "\n\n".join(filter(None, (message.content for message in opening)))
    conversation = [{"role": "system", "content": texts}] if opening else []
    conversation += [{"role": message.role, "content": message.content} for message in messages[len(opening) :]]
    expected = real.reference.apply_chat_template(conversation, add_generation_prompt=True)
    assert real.encode(messages) == expected["input_ids"]


@given(ODD_TEXTS)
def test_the_tokens_of_a_texts_parts_are_those_of_the_text(real: Real, text: str) -> None:
    parts = real.cutter.parts(text)
    ids_of = real.encoder.encode_pieces
    assert [token for part in parts for token in ids_of([part]).tolist()] == ids_of([text]).tolist()


@given(
    st.lists(st.sampled_from([*SPECIAL, "x ", "<|im_", "start|>", "<file_"]), min_size=1, max_size=5).map("".join),
    ROLES,
)
def test_no_text_becomes_a_special_token(real: Real, text: str, role: str) -> None:
    plain = real.control_ids([Message(role, "x"), Message("user", "x")])
    assert real.control_ids([Message(role, text), Message("user", text)]) == plain
    token_ids = real.encoder.encode(text, add_special_tokens=True)
    assert real.encoder.decode(token_ids) == text
