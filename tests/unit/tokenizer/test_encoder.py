from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from services.tokenizer.chat_template import ChatTemplate, Message
from services.tokenizer.encoder import Encoder, load_tokenizer
from services.tokenizer.prompts import PromptEncoder
from shared.errors import RequestTooLargeError
from shared.model_dir import ModelDirectoryError
from tests.support.tiny_tokenizer import IM_START, IM_START_ID, tiny_tokenizer


def tokenizer_with_bos() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{IM_START} $A", special_tokens=[(IM_START, IM_START_ID)]
    )
    return tokenizer


@pytest.mark.parametrize("text", ["", "The fox", "12345 你好 😀\n\n", " <|im_end|> "])
def test_ids_are_those_of_the_tokenizer(text: str) -> None:
    encoder = Encoder(tiny_tokenizer(), num_threads=1)
    token_ids = encoder.encode(text, add_special_tokens=True)
    assert token_ids.dtype == np.dtype("<i4")
    assert token_ids.tolist() == encoder.tokenizer.encode(text).ids
    assert encoder.decode(token_ids) == encoder.tokenizer.decode(token_ids.tolist())


async def test_plain_text_gets_the_tokenizers_special_tokens_and_a_conversation_none() -> None:
    encoder = Encoder(tokenizer_with_bos(), num_threads=1)
    prompts = PromptEncoder(encoder, ChatTemplate("{{ messages[0].content }}", {}))
    plain = tiny_tokenizer().encode("The fox").ids
    assert (await prompts.encode("The fox")).tolist() == [IM_START_ID, *plain]
    assert (await prompts.encode((Message("user", "The fox"),))).tolist() == plain


async def test_work_runs_off_the_event_loop() -> None:
    encoder = Encoder(tiny_tokenizer(), num_threads=1)
    assert await encoder.run(threading.get_ident) != threading.get_ident()


async def test_a_conversation_whose_text_becomes_too_large_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", {})
    prompts = PromptEncoder(Encoder(tiny_tokenizer(), num_threads=1), template)
    with pytest.raises(RequestTooLargeError):
        await prompts.encode((Message("user", "x" * 2**21),))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
