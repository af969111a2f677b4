"""Scores and ranks over real HTTP, in the bodies of every service that has them. The test plays the scheduler."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.key_files import key_line, write_keys
from tests.support.tokenizer.exchange_peer import Position, Row, make_end, read_column
from tests.support.tokenizer.http_client import MAX_TOKENS, Answer, HttpService, run_http_service
from tests.support.tokenizer.rerankers import SHORT_TEMPLATE
from tests.unit.tokenizer.http.test_openapi import check

SCORES, RANKS = ("/v1/score", "/score"), ("/v1/rerank", "/v2/rerank", "/rerank")
LOGPROBS = [(-2.0, -1.0), (-1.0, -4.0), (-3.0, -3.0)]
ODDS = [first - second for first, second in LOGPROBS]
PROBABILITIES = [1 / (1 + math.exp(-odds)) for odds in ODDS]
DOCUMENTS = ["a", "bb", "ccc"]
LOG_ODDS_ORDER = [1, 2, 0]


@pytest.fixture
async def scorer(tmp_path: Path, model_dir: Path) -> AsyncIterator[HttpService]:
    """A service whose model has a recipe."""
    template = tmp_path / "template.jinja"
    template.write_text(SHORT_TEMPLATE, encoding="utf-8")
    async with run_http_service(model_dir, tmp_path, score_template=str(template), score_labels=("y", "n")) as running:
        yield running


async def rated(
    http: HttpService, path: str, body: Any, logprobs: Sequence[Sequence[float]] = LOGPROBS
) -> tuple[Answer, list[list[int]]]:
    """An answer, which must be of the form that the API's description gives it, and the prompts."""
    task = asyncio.create_task(http.post(path, body))
    prompts = []
    for values in logprobs:
        sent = await http.submit_of(task)
        prompts.append(read_column(sent.prompt_token_ids))
        labels = read_column(sent.options.logprob_token_ids)
        entries = [(70, -0.5), *zip(labels, values, strict=True)]
        row = Row(sent.handle, 0, [70], logprobs=[Position(1, entries, tuple(range(2, 2 + len(labels))))])
        http.service.peer.send(row, ends=[make_end(sent.handle, MAX_TOKENS, 1)])
    answer = await task
    check(path, "post", answer)
    assert answer.status == 200
    return answer, prompts


async def texts_of(http: HttpService, prompts: list[list[int]]) -> list[str]:
    """Prompts as texts, without control tokens."""
    return [(await http.post("/detokenize", {"tokens": prompt})).value["prompt"] for prompt in prompts]


@pytest.mark.parametrize("path", SCORES)
async def test_one_text_is_scored_against_others(scorer: HttpService, path: str) -> None:
    answer, prompts = await rated(scorer, path, {"model": "tiny", "text_1": "q", "text_2": DOCUMENTS})
    value = answer.value
    assert [each["index"] for each in value["data"]] == [0, 1, 2]
    assert [each["score"] for each in value["data"]] == pytest.approx(PROBABILITIES)
    assert value["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert await texts_of(scorer, prompts) == [f"query\nqdocument\n{each}" for each in DOCUMENTS]


async def test_texts_are_scored_in_pairs(scorer: HttpService) -> None:
    body = {"text_1": ["q", "r"], "text_2": ["a", "bb"], "instruction": "i"}
    _, prompts = await rated(scorer, "/score", body, LOGPROBS[:2])
    assert await texts_of(scorer, prompts) == ["system\niquery\nqdocument\na", "system\niquery\nrdocument\nbb"]


async def test_a_single_text_is_scored(scorer: HttpService) -> None:
    answer, _ = await rated(scorer, "/score", {"text_1": "q", "text_2": "a"}, LOGPROBS[:1])
    assert len(answer.value["data"]) == 1


async def test_a_score_may_be_the_difference_of_the_logits(scorer: HttpService) -> None:
    answer, _ = await rated(scorer, "/score", {"text_1": "q", "text_2": DOCUMENTS, "use_activation": False})
    assert [each["score"] for each in answer.value["data"]] == pytest.approx(ODDS)


@pytest.mark.parametrize("path", RANKS)
async def test_documents_are_ranked_as_in_jinas_and_coheres_bodies(scorer: HttpService, path: str) -> None:
    answer, _ = await rated(scorer, path, {"model": "tiny", "query": "q", "documents": DOCUMENTS, "top_n": 2})
    results = answer.value["results"]
    assert [each["index"] for each in results] == LOG_ODDS_ORDER[:2]
    assert [each["relevance_score"] for each in results] == pytest.approx([PROBABILITIES[1], PROBABILITIES[2]])
    assert [each["document"]["text"] for each in results] == ["bb", "ccc"]
    assert answer.value["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("top_n", [None, 0, 3, 50])
async def test_all_documents_are_ranked_unless_fewer_are_wanted(scorer: HttpService, top_n: int | None) -> None:
    body = {"query": "q", "documents": [{"text": each} for each in DOCUMENTS], "top_n": top_n}
    answer, prompts = await rated(scorer, "/rerank", {**body, "return_documents": False})
    assert [each["index"] for each in answer.value["results"]] == LOG_ODDS_ORDER
    assert all(each.keys() == {"index", "relevance_score"} for each in answer.value["results"])
    assert (await texts_of(scorer, prompts))[2] == "query\nqdocument\nccc"


async def test_probabilities_that_are_equal_are_ranked_by_their_logits(scorer: HttpService) -> None:
    logprobs = [(-1e-9, -60.0), (-1e-9, -61.0), (-1e-9, -61.0)]
    answer, _ = await rated(scorer, "/rerank", {"query": "q", "documents": DOCUMENTS}, logprobs)
    assert [each["index"] for each in answer.value["results"]] == [1, 2, 0]
    assert {each["relevance_score"] for each in answer.value["results"]} == {1.0}


@pytest.mark.parametrize("path", RANKS)
@pytest.mark.parametrize("is_raw", [False, True])
async def test_teis_body_has_a_list_as_its_answer(scorer: HttpService, path: str, *, is_raw: bool) -> None:
    body = {"query": "q", "texts": DOCUMENTS, "raw_scores": is_raw, "return_text": is_raw, "truncate": False}
    answer, _ = await rated(scorer, path, body)
    scores = ODDS if is_raw else PROBABILITIES
    assert [each["index"] for each in answer.value] == LOG_ODDS_ORDER
    assert [each["score"] for each in answer.value] == pytest.approx([scores[index] for index in LOG_ODDS_ORDER])
    assert [each.get("text") for each in answer.value] == (["bb", "ccc", "a"] if is_raw else [None] * 3)


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"query": "The ", "items": ["fox", "dog"]}, ["The fox", "The dog"]),
        ({"query": "The ", "items": ["fox", "dog"], "item_first": True}, ["foxThe ", "dogThe "]),
        ({"query": [70, 71], "items": [[72], [73]]}, [[70, 71, 72], [70, 71, 73]]),
        ({"query": [70, 71], "items": [[72], [73]], "item_first": True}, [[72, 70, 71], [73, 70, 71]]),
        ({"query": "The ", "items": "fox"}, ["The fox"]),
    ],
)
@pytest.mark.parametrize("softmax", [None, False, True])
async def test_items_are_rated_by_labels_as_in_sglang(
    http: HttpService, body: dict[str, Any], prompts: list[Any], softmax: bool | None
) -> None:
    body = {**body, "label_token_ids": [70, 71], "apply_softmax": softmax}
    answer, sent = await rated(http, "/v1/score", body, LOGPROBS[: len(prompts)])
    expected = [await tokens_of(http, each) if isinstance(each, str) else each for each in prompts]
    assert sent == expected
    scores = [
        [probability, 1 - probability] if softmax else list(map(math.exp, logprobs))
        for probability, logprobs in zip(PROBABILITIES, LOGPROBS, strict=True)
    ]
    assert answer.value["scores"] == [pytest.approx(each) for each in scores[: len(prompts)]]


async def tokens_of(http: HttpService, text: str) -> list[int]:
    tokens: list[int] = (await http.post("/tokenize", {"prompt": text})).value["tokens"]
    return tokens


async def test_one_label_is_rated_among_all_tokens(http: HttpService) -> None:
    body = {"query": "The ", "items": ["fox"], "label_token_ids": [70]}
    answer, _ = await rated(http, "/score", body, [(-2.0,)])
    assert answer.value["scores"] == [pytest.approx([math.exp(-2)])]


PAIR, TEXTS, RANK = {"text_1": "q", "text_2": "a"}, {"query": "q", "texts": ["a"]}, {"query": "q", "documents": ["a"]}
ITEMS = {"query": "q", "items": ["a"], "label_token_ids": [5, 6]}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {}, "text_1"),
    ("/score", {**PAIR, "text_1": ["q", "r"]}, "text_1"),
    ("/score", {**PAIR, "text_2": []}, "text_2"),
    ("/score", {**PAIR, "text_2": ["a", ""]}, "text_2[1]"),
    ("/score", {**PAIR, "text_1": ""}, "text_1"),
    ("/score", {"text_1": ["q", ""], "text_2": ["a", "b"]}, "text_1[1]"),
    ("/score", {**PAIR, "text_2": ["a"] * 1001}, "text_2"),
    ("/score", {**PAIR, "text_2": [5]}, "text_2[0]"),
    ("/score", {**PAIR, "use_activation": 1}, "use_activation"),
    ("/score", {**PAIR, "nonsense": 1}, "nonsense"),
    ("/score", {**PAIR, "timeout_s": 0}, "timeout_s"),
    ("/score", {**PAIR, "cache_salt": "x" * 65}, "cache_salt"),
    ("/score", {**ITEMS, "items": []}, "items"),
    ("/score", {**ITEMS, "items": ["a"] * 1001}, "items"),
    ("/score", {**ITEMS, "query": "", "items": ["a", ""]}, "items[1]"),
    ("/score", {**ITEMS, "items": [[70]]}, "items[0]"),
    ("/score", {**ITEMS, "query": [70], "items": [[420]]}, "items[0]"),
    ("/score", {**ITEMS, "items": [[70], 5]}, "items[1]"),
    ("/score", {**ITEMS, "items": 5}, "items"),
    ("/score", {**ITEMS, "query": [-1]}, "query"),
    ("/score", {**ITEMS, "query": {}}, "query"),
    ("/score", {**ITEMS, "label_token_ids": []}, "label_token_ids"),
    ("/score", {**ITEMS, "label_token_ids": [5], "apply_softmax": True}, "label_token_ids"),
    ("/score", {**ITEMS, "label_token_ids": [5, 5]}, "label_token_ids"),
    ("/score", {**ITEMS, "label_token_ids": [5, 420]}, "label_token_ids[1]"),
    ("/score", {**ITEMS, "label_token_ids": [5, 2**40]}, "label_token_ids[1]"),
    ("/score", {**ITEMS, "label_token_ids": list(range(21))}, "label_token_ids"),
    ("/score", {**ITEMS, "instruction": "i"}, "instruction"),
    ("/score", {"query": "q", "items": ["a"]}, "label_token_ids"),
    ("/rerank", {}, "query"),
    ("/rerank", {"query": "q"}, "documents"),
    ("/rerank", {**RANK, "documents": []}, "documents"),
    ("/rerank", {**RANK, "documents": ["a", ""]}, "documents[1]"),
    ("/rerank", {**RANK, "documents": ["a", {"title": "x"}]}, "documents[1]"),
    ("/rerank", {**RANK, "documents": ["a", {"text": "x", "image": "y"}]}, "documents[1]"),
    ("/rerank", {**RANK, "documents": ["a"] * 1001}, "documents"),
    ("/rerank", {**RANK, "query": ""}, "query"),
    ("/rerank", {**RANK, "top_n": -1}, "top_n"),
    ("/rerank", {**RANK, "truncation": True}, "truncation"),
    ("/rerank", {**RANK, "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ("/rerank", {**RANK, "rank_fields": ["title"]}, "rank_fields"),
    ("/rerank", {**TEXTS, "truncate": True}, "truncate"),
    ("/rerank", {**TEXTS, "texts": []}, "texts"),
    ("/rerank", {**TEXTS, "texts": ["a", ""]}, "texts[1]"),
    ("/rerank", {**TEXTS, "texts": ["a", {"text": "b"}]}, "texts[1]"),
    ("/rerank", {**TEXTS, "documents": ["a"]}, "documents"),
    ("/rerank", {**RANK, "documents": ["1" * 300]}, "documents"),
]


async def test_every_bad_field_is_a_400_with_its_name(scorer: HttpService) -> None:
    for path, body, param in BAD:
        answer = await scorer.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.error


@pytest.mark.parametrize(("path", "body"), [("/score", PAIR), ("/rerank", RANK), ("/rerank", TEXTS)])
async def test_a_model_without_a_recipe_is_not_guessed(http: HttpService, path: str, body: dict[str, Any]) -> None:
    answer = await http.post(path, body)
    names = {"text_2", "documents", "texts"}
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert answer.error["param"] in names & body.keys()
    assert "no recipe" in answer.error["message"]


async def test_another_model_is_not_served(scorer: HttpService) -> None:
    answer = await scorer.post("/rerank", {**RANK, "model": "other"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_what_has_no_effect_is_named(scorer: HttpService) -> None:
    answer, _ = await rated(scorer, "/rerank", {**RANK, "user": "me"}, LOGPROBS[:1])
    assert answer.headers["x-lockstep-ignored"] == "user"


async def test_a_large_body_is_rated_too(scorer: HttpService) -> None:
    documents = [f"{index}" for index in range(99)]
    # Blanks make the body too large for the event loop.
    task = asyncio.create_task(
        scorer.ask(
            "POST",
            "/rerank",
            data=json.dumps({"query": "q", "documents": documents, "top_n": 1}) + " " * 40_000,
            headers={"Content-Type": "application/json"},
        )
    )
    for _ in documents:
        sent = await scorer.submit_of(task)
        labels = read_column(sent.options.logprob_token_ids)
        score = float(int(sent.request_id.rpartition("-")[2]) == 70) - 2
        entries = [(70, -0.5), (labels[0], score), (labels[1], -1.0)]
        row = Row(sent.handle, 0, [70], logprobs=[Position(1, entries, (2, 3))])
        scorer.service.peer.send(row, ends=[make_end(sent.handle, MAX_TOKENS, 1)])
    answer = await task
    assert [each["index"] for each in answer.value["results"]] == [70]


async def test_a_client_that_leaves_aborts_its_items(http: HttpService) -> None:
    task, [sent] = await http.begin("/score", ITEMS)
    task.cancel()
    assert await http.service.peer.aborts.get() == sent.handle


async def test_a_request_may_take_only_so_long(http: HttpService) -> None:
    task, [sent] = await http.begin("/score", {**ITEMS, "timeout_s": 0.3})
    assert await http.service.peer.aborts.get() == sent.handle
    answer = await task
    assert (answer.status, answer.error["code"]) == (504, "deadline_passed")


async def test_keys_say_for_whom_items_are_rated(tmp_path: Path, model_dir: Path) -> None:
    keys = write_keys(tmp_path / "keys", key_line("one"))
    async with run_http_service(model_dir, tmp_path, client_keys=keys) as http:
        assert (await http.post("/score", ITEMS)).status == 401
        task, [sent] = await http.begin("/score", ITEMS, headers={"x-api-key": "one"})
        assert sent.tenant.name == "a"
        task.cancel()
