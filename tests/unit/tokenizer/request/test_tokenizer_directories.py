"""Directories whose tokens and chat templates are in different files: what transformers reads, we read."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from services.tokenizer.chat.conversation import Conversation, Message, Tool
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.request.model import load_model
from services.tokenizer.request.model_checks import can_compile_grammars
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.model_files.model_dir import read_tokenizer
from shared.request.grammar import GrammarLibrary
from tests.support.models.tiny_tokenizer import IM_END, IM_START
from tests.support.tokenizer.chat_templates import local_template
from tests.support.tokenizer.tokenizer_directories import TABLE

TEXTS = ["", "The fox", " a  b\n\n12345 it's é 你好 😀", "x <call> y</call>  z", "▁a [b] <think>"]
MESSAGES = (Message("user", "The fox's\n12 é"), Message("assistant", " Hi "), Message("user", "你好"))
TOOL = Tool("look_up", "", {"type": "object"})

# Their class gives them tokens that are in no file, or numbers them anew.
MORE, OTHERS = "GemmaTokenizer with more tokens", "Qwen2Tokenizer with a token less"

LENGTH = 10_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("directories")


@cache
def write(root: Path, name: str) -> Path:
    return TABLE[name].write(root / name.replace(" ", "-"))


@cache
def load(root: Path, name: str) -> tuple[Encoder, PromptEncoder, Any]:
    """Our encoders of a directory, without the trial of its template, and transformers' tokenizer."""
    directory = write(root, name)
    tokenizer = load_tokenizer(directory)
    encoder = Encoder(tokenizer.backend)
    templates = tokenizer.templates
    template = local_template(templates["default"], tokenizer.special_tokens, tools_source=templates.get("tool_use"))
    return encoder, PromptEncoder(encoder, template), AutoTokenizer.from_pretrained(directory)


def special_texts(tokenizer: Tokenizer) -> set[str]:
    return {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}


def tokens_of(tokenizer: Tokenizer) -> tuple[dict[str, int], dict[int, str]]:
    """All tokens, and the flags of the added ones."""
    added = tokenizer.get_added_tokens_decoder()
    return tokenizer.get_vocab(with_added_tokens=True), {token_id: repr(token) for token_id, token in added.items()}


@pytest.mark.parametrize("name", TABLE)
def test_texts_and_ids_equal_those_of_transformers(root: Path, name: str) -> None:
    encoder, _, theirs = load(root, name)
    special = special_texts(theirs.backend_tokenizer)
    # To us, a special token's text is a text.
    for text in (text for text in TEXTS if not any(token in text for token in special)):
        for adds in (True, False):
            token_ids = encoder.encode(text, add_special_tokens=adds)
            assert token_ids.tolist() == theirs(text, add_special_tokens=adds)["input_ids"]
            assert encoder.decode(token_ids) == theirs.decode(token_ids.tolist(), skip_special_tokens=True)
    every = np.arange(len(theirs))
    for skips in (True, False):
        expected = theirs.decode(every.tolist(), skip_special_tokens=skips)
        assert encoder.decode(every, skips_special_tokens=skips) == expected
    assert encoder.special_tokens == special
    assert encoder.added_tokens == theirs.get_added_vocab()


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TABLE)
async def test_chats_equal_those_of_transformers(root: Path, name: str, tools: tuple[Tool, ...]) -> None:
    _, prompts, theirs = load(root, name)
    messages = [{"role": message.role, "content": message.content} for message in MESSAGES]
    fields = [{"type": "function", "function": {"name": TOOL.name, "description": "", "parameters": TOOL.parameters}}]
    options: dict[str, Any] = {"tools": fields if tools else None, "add_generation_prompt": True}
    text, token_ids = await prompts.render_chat(Conversation(MESSAGES, tools), LENGTH)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert token_ids.tolist() == theirs.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize("name", TABLE)
def test_the_worker_knows_the_same_tokens(root: Path, name: str) -> None:
    directory = write(root, name)
    *_, theirs = load(root, name)
    source = read_tokenizer(directory)
    ours = Tokenizer.from_str(source)
    assert (tokens_of(ours) == tokens_of(theirs.backend_tokenizer)) is (name not in (MORE, OTHERS))
    assert can_compile_grammars(load_tokenizer(directory)) is (name != OTHERS)
    # What other readers of the file take as their ids.
    assert all(ours.token_to_id(token["content"]) == token["id"] for token in json.loads(source)["added_tokens"])


async def test_a_chat_of_the_service_has_its_first_and_last_tokens(root: Path) -> None:
    model = load_model(TokenizerSettings(model_dir=write(root, "only in the map")))
    text, _ = await model.prompts.render_chat(Conversation(MESSAGES[:1]), LENGTH)
    assert text.startswith(IM_START)
    assert text.endswith(IM_END)


def test_a_grammar_can_name_a_token_of_another_file(root: Path) -> None:
    directory = write(root, "added_tokens_decoder against added_tokens.json")
    library = GrammarLibrary(directory, (2,))
    token_id = Tokenizer.from_str(read_tokenizer(directory)).token_to_id("<new>")
    allowed = library.allowed_tokens(library.compile("start: <new>"))
    assert allowed.nonzero()[0].tolist() == [token_id]


def test_grammars_are_refused_where_the_worker_would_know_other_tokens(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_model(TokenizerSettings(model_dir=write(root, OTHERS)))
    (warning,) = [record for record in caplog.records if "grammars cannot be compiled" in record.message]
    assert "by the tokenizer's class, but" in warning.__dict__["error"]
