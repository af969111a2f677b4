"""A form that begins after reasoning, through real services, with drafts and through the death of the worker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer

from lockstep.v1 import tokenizer_pb2
from shared.model_files.model_dir import CHAT_TEMPLATE, TOKENIZER
from tests.support.cells.cell import REFERENCE
from tests.support.cells.split_cell import run_split_cell
from tests.support.clients.client import Answer, Completion, connect
from tests.support.models.tiny_llama import write_tiny_llama

FORM = r"[ab]{3,40}c"
DRAFTS = ("--worker.draft-proposer=ngram", "--scheduler.max-steps-in-flight=1")


def write_reasoner(directory: Path) -> Path:
    """A tiny model whose template opens the reasoning, and which knows the token that closes it."""
    write_tiny_llama(directory, changes={"num_hidden_layers": 2})
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(directory / TOKENIZER))
    template = directory / CHAT_TEMPLATE
    template.write_text(template.read_text(encoding="utf-8") + "<think>\n", encoding="utf-8")
    return directory


def make_requests(model_dir: Path) -> list[tokenizer_pb2.GenerateRequest]:
    """Chats that reason for a while: what closes the reasoning is as likely as a few other tokens."""
    [close_id] = Tokenizer.from_file(str(model_dir / TOKENIZER)).encode("</think>").ids
    return [
        tokenizer_pb2.GenerateRequest(
            chat={"messages": [{"role": tokenizer_pb2.ROLE_USER, "content": content}]},
            structured_output={"regex": FORM},
            sampling={
                "max_tokens": 300,
                "temperature": 1.0,
                "seed": seed,
                "logit_bias": {close_id: 4.0},
            },
        )
        for seed, content in enumerate(("hi", "the lazy dog", "aaaa", "hello, world"))
    ]


def check(completion: Completion) -> None:
    assert completion.reason == "EOS"
    assert re.fullmatch(FORM, completion.text), completion.text


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), DRAFTS], ids=["plain", "drafts"])
async def test_the_form_is_found_again_after_the_workers_death(tmp_path: Path, flags: tuple[str, ...]) -> None:
    model_dir = write_reasoner(tmp_path / "model")
    requests = make_requests(model_dir)
    with run_split_cell(model_dir, REFERENCE, *flags) as cell:
        await cell.wait_until_serving("tokenizer")
        async with connect(cell) as client:
            undisturbed = await client.generate_all(requests)
            calls = []
            for request in requests:
                call, answer = client.tokenizer.Generate(request), Answer()
                for _ in range(3):
                    answer.add(await call.read())
                calls.append((call, answer))
            cell.kill("worker")
            await client.wait_until(lambda state: not state.ready)
            cell.start("worker")
            for call, answer in calls:
                while (response := await call.read()) is not grpc.aio.EOF:
                    answer.add(response)
            resumed = [completion for _, answer in calls for completion in answer.choices.values()]
    for completion, expected in zip(resumed, undisturbed, strict=True):
        check(completion)
        assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
        assert completion.reasoning == expected.reasoning
    assert any(completion.reasoning for completion in undisturbed)


@pytest.mark.slow
async def test_drafts_change_nothing(tmp_path: Path) -> None:
    model_dir = write_reasoner(tmp_path / "model")
    texts = []
    for flags in ((), DRAFTS):
        with run_split_cell(model_dir, REFERENCE, *flags) as cell:
            await cell.wait_until_serving("tokenizer")
            async with connect(cell) as client:
                completions = await client.generate_all(make_requests(model_dir))
        for completion in completions:
            check(completion)
        texts.append([(completion.reasoning, completion.text, completion.token_ids) for completion in completions])
    assert json.dumps(texts[0]) == json.dumps(texts[1])
