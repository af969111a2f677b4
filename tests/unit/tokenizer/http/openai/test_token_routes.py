"""Encoding, decoding and rendering over HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service

BEGIN = 1


async def test_text_is_encoded_and_decoded(http: HttpService, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The fox").ids
    answer = await http.post("/tokenize", {"model": "tiny", "prompt": "The fox", "return_token_strs": True})
    strings = answer.value.pop("token_strs")
    assert "".join(strings) == "The fox"
    assert answer.value | {"token_strs": None} == {
        "count": len(ids),
        "max_model_len": CONTEXT_LENGTH,
        "tokens": ids,
        "token_strs": None,
    }
    assert (await http.post("/detokenize", {"tokens": ids})).value == {"prompt": "The fox"}


@pytest.mark.parametrize("text", ["", "The fox"])
async def test_special_tokens_are_added_unless_asked_not_to(model_dir: Path, tmp_path: Path, text: str) -> None:
    own = shutil.copytree(model_dir, tmp_path / "model")
    path = own / "tokenizer.json"
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [BEGIN], "tokens": ["<|im_start|>"]}}
    processor = {"type": "TemplateProcessing", "single": [begin, sequence], "pair": [begin], "special_tokens": special}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
    async with run_http_service(own, tmp_path) as http:
        plain = (await http.post("/tokenize", {"prompt": text, "add_special_tokens": False})).value["tokens"]
        assert (await http.post("/tokenize", {"prompt": text})).value["tokens"] == [BEGIN, *plain]
        assert (await http.post("/detokenize", {"tokens": plain})).value == {"prompt": text}


async def test_a_chat_is_encoded_as_it_is_rendered(http: HttpService) -> None:
    encoded = (await http.post("/tokenize", {"messages": MESSAGES})).value
    [rendered] = (await http.post("/v1/chat/completions/render", {"messages": MESSAGES})).value["prompts"]
    assert encoded["tokens"] == rendered["prompt_token_ids"]
    assert rendered["prompt"].endswith("<|im_start|>assistant\n")
    sent_task, [sent] = await http.begin("/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True})
    http.send(sent, [70])
    value = (await sent_task).value
    assert (value["prompt_token_ids"], value["choices"][0]["token_ids"]) == (encoded["tokens"], [70])


async def test_every_prompt_of_a_completion_is_rendered(http: HttpService, tokenizer: Tokenizer) -> None:
    answer = await http.post("/v1/completions/render", {"prompt": ["The fox", [70, 71]]})
    assert [prompt["prompt_token_ids"] for prompt in answer.value["prompts"]] == [
        tokenizer.encode("The fox").ids,
        [70, 71],
    ]


async def test_what_cannot_be_encoded_or_decoded_is_refused_by_name(http: HttpService) -> None:
    refused = [
        await http.post("/tokenize", {}),
        await http.post("/tokenize", {"messages": []}),
        await http.post("/detokenize", {}),
        await http.post("/detokenize", {"tokens": [70, 9999]}),
        await http.post("/detokenize", {"tokens": [70] * (CONTEXT_LENGTH + 1)}),
    ]
    assert [(answer.status, answer.error["param"]) for answer in refused] == [
        (400, "prompt"),
        (400, "messages"),
        (400, "tokens"),
        (400, "tokens[1]"),
        (400, "tokens"),
    ]
