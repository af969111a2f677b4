"""Vectors over real HTTP, in the body of OpenAI's embeddings. The test plays the scheduler."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tokenizer.embedders import PROMPTS, write_tokenizer_of_embedder
from tests.support.tokenizer.exchange_peer import Row, make_end, make_outputs, read_column
from tests.support.tokenizer.http_client import MAX_TOKENS, Answer, HttpService, run_http_service
from tests.unit.tokenizer.http.test_openapi import check

PATH = "/v1/embeddings"
SIZE = 3
VALUES = [(3.0, 4.0, 0.0), (0.0, 0.0, -2.0), (1.0, 0.0, 0.0)]
VECTORS = [[0.6, 0.8, 0.0], [0.0, 0.0, -1.0], [1.0, 0.0, 0.0]]


@pytest.fixture
async def embedder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpService]:
    """A service whose model has a recipe, linked to a cell that embeds."""
    directory = write_tokenizer_of_embedder(tmp_path_factory.mktemp("embedder") / "tiny", SIZE)
    async with run_http_service(directory, tmp_path, task="embed") as running:
        yield running


def give(http: HttpService, handle: int, values: Sequence[float]) -> None:
    """Send a prompt's vector."""
    outputs = make_outputs(Row(handle, 0, [0]), ends=[make_end(handle, MAX_TOKENS, 1)])
    outputs.vectors.add(handle=handle, values=np.array(values, "<f4").tobytes())
    http.service.peer.send_outputs(outputs)


async def embedded(http: HttpService, body: Any, *, num_items: int = 1) -> tuple[Answer, list[list[int]]]:
    """An answer, which must be of the form that the API's description gives it, and the prompts."""
    task = asyncio.create_task(http.post(PATH, body))
    prompts = []
    for values in VALUES[:num_items]:
        sent = await http.submit_of(task)
        prompts.append(read_column(sent.prompt_token_ids))
        give(http, sent.handle, values)
    answer = await task
    check(PATH, "post", answer)
    assert answer.status == 200
    return answer, prompts


@pytest.mark.parametrize(
    ("given", "num_items"),
    [("a", 1), (["a"], 1), (["a", "bb", "ccc"], 3), ([5, 6], 1), ([[5, 6], [7]], 2), (["a", [5]], 2), ([5.0], 1)],
)
async def test_inputs_are_texts_or_token_ids(embedder: HttpService, given: Any, num_items: int) -> None:
    answer, prompts = await embedded(embedder, {"model": "tiny", "input": given}, num_items=num_items)
    value = answer.value
    assert (value["object"], value["model"]) == ("list", "tiny")
    assert [(each["object"], each["index"]) for each in value["data"]] == [
        ("embedding", index) for index in range(num_items)
    ]
    assert [each["embedding"] for each in value["data"]] == [pytest.approx(each) for each in VECTORS[:num_items]]
    num_tokens = sum(map(len, prompts))
    assert value["usage"] == {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_vector_may_be_base64(embedder: HttpService) -> None:
    answer, _ = await embedded(embedder, {"input": "a", "encoding_format": "base64"})
    [data] = answer.value["data"]
    assert np.frombuffer(base64.b64decode(data["embedding"]), "<f4").tolist() == pytest.approx(VECTORS[0])


async def test_a_vector_may_be_cut(embedder: HttpService) -> None:
    answer, _ = await embedded(embedder, {"input": "a", "dimensions": 1, "encoding_format": "float"})
    assert answer.value["data"][0]["embedding"] == [1.0]


@pytest.mark.parametrize(
    ("fields", "prefix"),
    [
        ({}, ""),
        ({"input_type": "query"}, PROMPTS["query"]),
        ({"input_type": "search_query"}, PROMPTS["query"]),
        ({"prompt_name": "query"}, PROMPTS["query"]),
        ({"input_type": "passage"}, ""),
        ({"input_type": "document", "truncate_prompt_tokens": 200}, ""),
    ],
)
async def test_a_query_gets_its_prompt(embedder: HttpService, fields: dict[str, Any], prefix: str) -> None:
    _, [prompt] = await embedded(embedder, {"input": "a text", **fields})
    text = (await embedder.post("/detokenize", {"tokens": prompt})).value["prompt"]
    assert text == f"{prefix}a text"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": 5}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 5]}, "input"),
    ({"input": [[5], [420]]}, "input[1]"),
    ({"input": [420]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [1.5]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "1" * 300}, "input"),
    ({"input": ["1" * 300, "a"]}, "input"),
    ({"input": "a", "model": 5}, "model"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
    ({"input": "a", "dimensions": "2"}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ({"input": "a", "input_type": "classification"}, "input_type"),
    ({"input": "a", "prompt_name": "other"}, "prompt_name"),
    ({"input": "a", "prompt_name": 5}, "prompt_name"),
    ({"input": "a", "prompt_name": "query", "input_type": "query"}, "prompt_name"),
    ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
    ({"input": "a", "nonsense": 1}, "nonsense"),
    ({"input": "a", "timeout_s": 0}, "timeout_s"),
    ({"input": "a", "cache_salt": "x" * 65}, "cache_salt"),
    ({"input": "a", "determinism": "sure"}, "determinism"),
]


async def test_every_bad_field_is_a_400_with_its_name(embedder: HttpService) -> None:
    for body, param in BAD:
        answer = await embedder.post(PATH, body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.error


async def test_another_model_is_not_served(embedder: HttpService) -> None:
    answer = await embedder.post(PATH, {"input": "a", "model": "other"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_a_model_served_for_text_makes_no_vectors(http: HttpService) -> None:
    answer = await http.post(PATH, {"input": "a"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "model")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [5, 6]}),
        ("/v1/rerank", {"query": "q", "documents": ["a"]}),
    ],
)
async def test_a_model_served_for_vectors_writes_no_text(embedder: HttpService, path: str, body: Any) -> None:
    answer = await embedder.post(path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "model")


async def test_what_has_no_effect_is_named(embedder: HttpService) -> None:
    answer, _ = await embedded(embedder, {"input": "a", "user": "me"})
    assert answer.headers["x-lockstep-ignored"] == "user"


async def test_a_large_body_and_a_large_answer_are_made_off_the_event_loop(embedder: HttpService) -> None:
    texts = [f"{index}" for index in range(90)]
    # Blanks make the body too large for the event loop.
    data = json.dumps({"input": texts}) + " " * 40_000
    task = asyncio.create_task(embedder.ask("POST", PATH, data=data, headers={"Content-Type": "application/json"}))
    for _ in texts:
        sent = await embedder.submit_of(task)
        give(embedder, sent.handle, [0.0, float(sent.request_id.rpartition("-")[2]) + 1, 0.0])
    answer = await task
    assert [each["embedding"] for each in answer.value["data"]] == [[0.0, 1.0, 0.0]] * len(texts)


async def test_a_client_that_leaves_aborts_its_items(embedder: HttpService) -> None:
    task, [sent] = await embedder.begin(PATH, {"input": ["a", "b"]})
    task.cancel()
    assert await embedder.service.peer.aborts.get() == sent.handle
