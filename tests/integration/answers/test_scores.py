"""Scores of a small reranker through all three services, against transformers' logits by the card's recipe.

On `reference`: chunks, the cache, neighbours and deaths change no bit; the size of a TP group changes sums.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import torch
from tokenizers import Tokenizer

from lockstep.v1 import tokenizer_pb2
from shared.model_files.model_dir import TOKENIZER
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.integration.command.test_cli import run_client
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.cells.split_cell import IN_SEVERAL_STEPS, run_split_cell
from tests.support.clients.client import CellAddresses, connect
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.system.ports import free_port
from tests.support.tokenizer.rerankers import PAIR_TEMPLATE, add_labels, write_reranker_files

# Of the model card of Qwen3-Reranker, "Transformers Usage".
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

QUERY = "Which animal is quick?"
DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog.",
    "дом",
    "你好 世界",
    "def main():\n\treturn 1",
    " x",
    "the " * 40,
]
KNOWN_NAME = "Qwen3-Reranker-0.6B"
TOLERANCE = 1e-4


@dataclass
class Reranker:
    """A model in the shape of Qwen3-Reranker, and transformers' own."""

    directory: Path
    theirs: Any
    labels: tuple[int, int]

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(self.directory / TOKENIZER))

    def card_score(self, query: str, document: str, instruction: str = INSTRUCTION) -> float:
        """The score as the card computes it."""
        middle = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        return self.score_of([token for part in (PREFIX, middle, SUFFIX) for token in self._encode(part)])

    def template_score(self, query: str, document: str, instruction: str) -> float:
        """The score by the template that is in its files."""
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        return self.score_of(self._encode(f"<|im_start|>user\n{pair}<|im_end|>\n<|im_start|>assistant"))

    def score_of(self, prompt: Sequence[int]) -> float:
        """The score of a prompt."""
        with torch.inference_mode():
            logits = self.theirs(torch.tensor([prompt])).logits[0, -1]
        yes, no = self.labels
        return float(torch.softmax(logits[[yes, no]].double(), 0)[0])

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    """The model as it is published without a recipe: a plain causal model with a chat template, and a known name."""
    model = build_small_model("Qwen3ForCausalLM", "plain")
    directory = write_small_model(model, tmp_path_factory.mktemp("reranker") / KNOWN_NAME)
    return Reranker(directory, model, add_labels(directory))


@pytest.fixture(scope="module")
def cell(reranker: Reranker) -> Iterator[Cell]:
    """A cell that knows the model by its name."""
    with start_cell(reranker.directory, REFERENCE, f"--http-listen=127.0.0.1:{free_port()}") as cell:
        yield cell


def request_for(documents: Sequence[str] = DOCUMENTS, **fields: Any) -> tokenizer_pb2.ScoreRequest:
    return tokenizer_pb2.ScoreRequest(pairs={"queries": [QUERY], "documents": documents}, **fields)


async def score(cell: CellAddresses, request: tokenizer_pb2.ScoreRequest) -> tokenizer_pb2.ScoreResponse:
    async with connect(cell) as client:
        response: tokenizer_pb2.ScoreResponse = await client.tokenizer.Score(request)
        return response


def scores_of(response: tokenizer_pb2.ScoreResponse) -> list[float]:
    return [item.score for item in response.items]


async def test_scores_are_those_of_the_card(cell: Cell, reranker: Reranker) -> None:
    response = await score(cell, request_for())
    expected = [reranker.card_score(QUERY, document) for document in DOCUMENTS]
    assert scores_of(response) == pytest.approx(expected, abs=TOLERANCE)
    # Scores that hardly differ would prove little.
    assert max(expected) - min(expected) > 0.05
    # What the prompts share is computed once.
    cached = [item.usage.num_cached_tokens for item in response.items]
    assert cached[0] == 0
    assert min(cached[1:]) > 100


async def test_an_instruction_takes_the_place_of_the_cards(cell: Cell, reranker: Reranker) -> None:
    request = request_for()
    request.pairs.instruction = "Find code"
    expected = [reranker.card_score(QUERY, document, "Find code") for document in DOCUMENTS]
    assert scores_of(await score(cell, request)) == pytest.approx(expected, abs=TOLERANCE)


async def test_what_is_cached_and_what_runs_beside_it_change_no_bit(cell: Cell) -> None:
    exact = request_for(determinism="DETERMINISM_EXACT")
    alone = await score(cell, exact)
    again, *others = await asyncio.gather(*(score(cell, exact) for _ in range(4)))
    assert [list(item.logprobs) for item in again.items] == [list(item.logprobs) for item in alone.items]
    assert all(scores_of(other) == scores_of(alone) for other in others)
    backwards = await score(cell, request_for(DOCUMENTS[::-1], determinism="DETERMINISM_EXACT"))
    assert scores_of(backwards) == scores_of(alone)[::-1]


async def test_prompts_are_rated_by_labels_of_the_request(cell: Cell, reranker: Reranker) -> None:
    prompts = [[5, 6, 7], [9] * 30]
    items = [tokenizer_pb2.Prompt(tokens={"token_ids": prompt}) for prompt in prompts]
    request = tokenizer_pb2.ScoreRequest(prompts={"prompts": items}, label_token_ids=reranker.labels)
    expected = [reranker.score_of(prompt) for prompt in prompts]
    assert scores_of(await score(cell, request)) == pytest.approx(expected, abs=TOLERANCE)


async def test_both_doors_rate_alike(cell: Cell) -> None:
    expected = scores_of(await score(cell, request_for(determinism="DETERMINISM_EXACT")))
    order = sorted(range(len(expected)), key=lambda index: -expected[index])
    common = {"query": QUERY, "determinism": "exact"}
    async with aiohttp.ClientSession() as session:

        async def post(path: str, body: dict[str, Any]) -> Any:
            async with session.post(f"http://{cell.http_address}{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        scored = await post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS, "determinism": "exact"})
        ranked = await post("/v2/rerank", {**common, "documents": DOCUMENTS})
        listed = await post("/rerank", {**common, "texts": DOCUMENTS})
    assert [each["score"] for each in scored["data"]] == expected
    assert [(each["index"], each["relevance_score"]) for each in ranked["results"]] == [
        (index, expected[index]) for index in order
    ]
    assert [(each["index"], each["score"]) for each in listed] == [(index, expected[index]) for index in order]


@pytest.mark.parametrize("by_stdin", [False, True])
def test_the_command_ranks_documents(cell: Cell, reranker: Reranker, *, by_stdin: bool) -> None:
    documents = ["the fox", "the dog", "x"]
    given, stdin = ([], "\n".join(documents) + "\n\n") if by_stdin else (documents, "")
    result = run_client("rerank", f"--target={cell.address}", "--top-n=2", QUERY, *given, stdin=stdin)
    assert (result.returncode, result.stderr) == (0, "")
    expected = {document: reranker.card_score(QUERY, document) for document in documents}
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [text for _, _, text in lines] == sorted(documents, key=lambda each: -expected[each])[:2]
    for score_text, index, text in lines:
        assert documents[int(index)] == text
        assert float(score_text) == pytest.approx(expected[text], abs=TOLERANCE)


def test_the_command_tells_why_a_model_ranks_nothing(tiny_cell: Cell) -> None:
    result = run_client("rerank", f"--target={tiny_cell.address}", QUERY, "a")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: pairs: the model has no recipe")


async def test_a_directory_without_a_recipe_is_not_guessed(tiny_cell: Cell) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(tiny_cell, request_for())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(status_from_rpc_error(caught.value)) == "INVALID_REQUEST"


@pytest.mark.slow
async def test_files_of_sentence_transformers_are_followed(reranker: Reranker, tmp_path: Path) -> None:
    directory = write_small_model(reranker.theirs, tmp_path / "with-files")
    yes, no = add_labels(directory)
    config = {"prompts": {"web": "Search"}, "default_prompt_name": "web"}
    labels = {"true_token_id": yes, "false_token_id": no}
    write_reranker_files(directory, labels, template=PAIR_TEMPLATE, config=config)
    with start_cell(directory, REFERENCE) as cell:
        response = await score(cell, request_for())
        expected = [reranker.template_score(QUERY, document, "Search") for document in DOCUMENTS]
        assert scores_of(response) == pytest.approx(expected, abs=TOLERANCE)
        assert list(response.label_token_ids) == [yes, no]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ("--scheduler.max-num-batched-tokens=48", "--scheduler.max-num-seqs=8"),
            id="chunked",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--scheduler.no-enable-prefix-caching",), id="uncached", marks=pytest.mark.proof),
        pytest.param(("--scheduler.max-num-seqs=2",), id="few at once", marks=pytest.mark.proof),
    ],
)
async def test_how_a_cell_computes_changes_no_bit(cell: Cell, reranker: Reranker, flags: tuple[str, ...]) -> None:
    exact = request_for(determinism="DETERMINISM_EXACT")
    with start_cell(reranker.directory, REFERENCE, *flags) as other:
        assert scores_of(await score(other, exact)) == scores_of(await score(cell, exact))


@pytest.mark.slow
async def test_a_group_of_two_gives_the_cards_scores(reranker: Reranker) -> None:
    with start_cell(reranker.directory, REFERENCE, "--tp=2") as cell:
        expected = [reranker.card_score(QUERY, document) for document in DOCUMENTS]
        assert scores_of(await score(cell, request_for())) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_a_death_in_between_changes_no_bit(cell: Cell, reranker: Reranker, role: str) -> None:
    documents = [f"{document} {number}" for number in range(60) for document in DOCUMENTS]
    exact = request_for(documents, determinism="DETERMINISM_EXACT")
    expected = scores_of(await score(cell, exact))
    with run_split_cell(reranker.directory, REFERENCE, *IN_SEVERAL_STEPS) as split:
        await split.wait_until_serving("tokenizer")
        call = asyncio.create_task(score(split, exact))
        # Their scores are known.
        await split.wait_until_finished(3)
        split.kill(role)
        split.start(role)
        response = await call
    assert scores_of(response) == expected
    assert any(item.recovery.resume_count for item in response.items)
