"""Vectors of a small embedder through all three services, against transformers' hidden states by the recipe.

On `reference`: chunks, the cache, neighbours and deaths change no bit; the size of a TP group changes sums.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2
from shared.model_files.model_dir import CONFIG, SENTENCE_MODULES, TOKENIZER
from shared.network.rpc import make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.integration.command.test_cli import run_client
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.cells.split_cell import IN_SEVERAL_STEPS, run_split_cell
from tests.support.clients.client import CellAddresses, connect
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.models.tiny_tokenizer import ENDOFTEXT
from tests.support.system.ports import free_port
from tests.support.tokenizer.embedders import (
    LAST,
    MEAN,
    PROMPTS,
    append_token,
    make_base_class,
    write_embedder_files,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "дом",
    "你好 世界",
    "def main():\n\treturn 1",
    " x ",
    "the " * 40,
]
TOLERANCE = 1e-4
EMBED = "--task=embed"

Vector = npt.NDArray[np.float32]


@dataclass
class Embedder:
    """A model in the shape of Qwen3-Embedding as it is published, and transformers' own."""

    directory: Path
    theirs: Any
    pools_mean: bool

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(self.directory / TOKENIZER))

    def vector(self, text: str, prompt: str = "") -> Vector:
        """The vector as sentence-transformers makes it: of the tokenizer's tokens, the appended one too."""
        return self.vector_of(self._tokenizer.encode(prompt + text).ids)

    def vector_of(self, token_ids: Sequence[int]) -> Vector:
        """The vector of tokens."""
        with torch.inference_mode():
            hidden = self.theirs(torch.tensor([token_ids])).last_hidden_state[0]
        pooled = hidden.mean(0) if self.pools_mean else hidden[-1]
        return np.asarray(torch.nn.functional.normalize(pooled, dim=0).numpy())


def write_embedder(directory: Path, pooling: Mapping[str, Any]) -> Embedder:
    model = build_small_model("Qwen3ForCausalLM", "plain")
    write_small_model(model, directory)
    append_token(directory, ENDOFTEXT)
    make_base_class(directory)
    write_embedder_files(directory, pooling=pooling)
    return Embedder(directory, model.model, pools_mean=pooling is MEAN)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "last", LAST)


@pytest.fixture(scope="module")
def averager(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "mean", MEAN)


@pytest.fixture(scope="module")
def cell(embedder: Embedder) -> Iterator[Cell]:
    with start_cell(embedder.directory, REFERENCE, EMBED, f"--http-listen=127.0.0.1:{free_port()}") as cell:
        yield cell


@pytest.fixture(scope="module")
def mean_cell(averager: Embedder) -> Iterator[Cell]:
    with start_cell(averager.directory, REFERENCE, EMBED) as cell:
        yield cell


def request_for(texts: Sequence[str] = TEXTS, **fields: Any) -> tokenizer_pb2.EmbedRequest:
    prompts = [tokenizer_pb2.Prompt(text=text) for text in texts]
    return tokenizer_pb2.EmbedRequest(prompts={"prompts": prompts}, **fields)


async def embed(cell: CellAddresses, request: tokenizer_pb2.EmbedRequest) -> tokenizer_pb2.EmbedResponse:
    async with connect(cell) as client:
        response: tokenizer_pb2.EmbedResponse = await client.tokenizer.Embed(request)
        return response


def vectors_of(response: tokenizer_pb2.EmbedResponse) -> list[list[float]]:
    return [list(embedding.values) for embedding in response.embeddings]


def assert_close(vectors: Sequence[Sequence[float]], expected: Sequence[Vector]) -> None:
    assert len(vectors) == len(expected)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


async def test_vectors_are_those_of_the_recipe(cell: Cell, embedder: Embedder) -> None:
    response = await embed(cell, request_for())
    expected = [embedder.vector(text) for text in TEXTS]
    assert_close(vectors_of(response), expected)
    # Vectors that hardly differ would prove little.
    assert max(float(expected[0] @ other) for other in expected[1:]) < 0.95
    assert response.usage.num_completion_tokens == 0
    assert response.usage.num_prompt_tokens == sum(each.usage.num_prompt_tokens for each in response.embeddings)


async def test_a_query_gets_its_prompt(cell: Cell, embedder: Embedder) -> None:
    expected = [embedder.vector(text, PROMPTS["query"]) for text in TEXTS]
    for fields in ({"input_type": "INPUT_TYPE_QUERY"}, {"prompt_name": "query"}):
        assert_close(vectors_of(await embed(cell, request_for(**fields))), expected)
    documents = await embed(cell, request_for(input_type="INPUT_TYPE_DOCUMENT"))
    assert_close(vectors_of(documents), [embedder.vector(text) for text in TEXTS])


async def test_token_ids_are_the_input_as_they_are(cell: Cell, embedder: Embedder) -> None:
    prompts = [[5, 6, 7], [9] * 30]
    items = [tokenizer_pb2.Prompt(tokens={"token_ids": prompt}) for prompt in prompts]
    response = await embed(cell, tokenizer_pb2.EmbedRequest(prompts={"prompts": items}))
    assert_close(vectors_of(response), [embedder.vector_of(prompt) for prompt in prompts])


async def test_what_is_cached_and_what_runs_beside_it_change_no_bit(cell: Cell) -> None:
    exact = request_for(determinism="DETERMINISM_EXACT")
    alone = await embed(cell, exact)
    again, *others = await asyncio.gather(*(embed(cell, exact) for _ in range(4)))
    assert max(each.usage.num_cached_tokens for each in again.embeddings) > 0
    assert all(vectors_of(other) == vectors_of(alone) for other in (again, *others))
    backwards = await embed(cell, request_for(TEXTS[::-1], determinism="DETERMINISM_EXACT"))
    assert vectors_of(backwards) == vectors_of(alone)[::-1]


async def test_a_mean_is_that_of_all_tokens_and_of_no_cached_ones(mean_cell: Cell, averager: Embedder) -> None:
    exact = request_for(determinism="DETERMINISM_EXACT")
    first = await embed(mean_cell, exact)
    assert_close(vectors_of(first), [averager.vector(text) for text in TEXTS])
    again = await embed(mean_cell, exact)
    assert vectors_of(again) == vectors_of(first)
    assert again.usage.num_cached_tokens == 0


async def test_both_doors_give_the_same_vectors(cell: Cell) -> None:
    expected = vectors_of(await embed(cell, request_for(determinism="DETERMINISM_EXACT")))
    async with aiohttp.ClientSession() as session:

        async def post(**body: Any) -> Any:
            body = {"input": TEXTS, "determinism": "exact", **body}
            async with session.post(f"http://{cell.http_address}/v1/embeddings", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        numbers, encoded = await post(), await post(encoding_format="base64")
        cut = await post(dimensions=8)
    assert [each["embedding"] for each in numbers["data"]] == expected
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in encoded["data"]]
    assert decoded == expected
    heads = np.array(expected)[:, :8]
    lengths = np.linalg.norm(heads, axis=1, keepdims=True)
    np.testing.assert_allclose([each["embedding"] for each in cut["data"]], heads / lengths, atol=1e-6)


async def test_text_is_refused_by_name(cell: Cell) -> None:
    async with aiohttp.ClientSession() as session:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/responses", {"input": "x"}),
        ):
            async with session.post(f"http://{cell.http_address}{path}", json=body) as answer:
                text = await answer.text()
                assert answer.status == 400, text
                assert "the model is served for vectors" in text
    async with make_channel(cell.scheduler_address, internal=True) as channel:
        direct: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=[5])
        with pytest.raises(grpc.aio.AioRpcError, match="the model is served for vectors"):
            async for _ in direct.Generate(request):
                pass


async def test_vectors_of_a_model_served_for_text_are_refused(tiny_cell: Cell) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="model: the model is served for text") as caught:
        await embed(tiny_cell, request_for())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(status_from_rpc_error(caught.value)) == "INVALID_REQUEST"


@pytest.mark.parametrize("by_stdin", [False, True])
def test_the_command_prints_vectors(cell: Cell, embedder: Embedder, *, by_stdin: bool) -> None:
    texts = ["the fox", "the dog", "x"] * 30
    given, stdin = ([], "\n".join(texts) + "\n\n") if by_stdin else (texts, "")
    result = run_client("embed", f"--target={cell.address}", "--input-type=query", *given, stdin=stdin)
    assert (result.returncode, result.stderr) == (0, "")
    vectors = [json.loads(line) for line in result.stdout.splitlines()]
    assert_close(vectors, [embedder.vector(text, PROMPTS["query"]) for text in texts])


def refused_start(directory: Path, *flags: str) -> str:
    """What `lockstep serve` says when it refuses to start."""
    result = run_client("serve", str(directory), *flags)
    assert (result.returncode, result.stdout) == (2, "")
    return result.stderr


def test_a_directory_without_the_recipe_is_not_guessed(embedder: Embedder, tmp_path: Path) -> None:
    directory = tmp_path / "bare"
    directory.mkdir()
    for path in embedder.directory.iterdir():
        if path.name != SENTENCE_MODULES:
            (directory / path.name).symlink_to(path)
    assert "has no modules.json" in refused_start(directory, EMBED)
    assert "Qwen3Model has no head and makes vectors: serve it with --task embed" in refused_start(directory)
    (directory / CONFIG).unlink()
    config = json.loads((embedder.directory / CONFIG).read_text(encoding="utf-8"))
    (directory / CONFIG).write_text(json.dumps({**config, "architectures": ["BertModel"]}), encoding="utf-8")
    assert "BertModel is an encoder" in refused_start(directory, EMBED)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_chunks_change_no_bit(request: pytest.FixtureRequest, pooling: str) -> None:
    whole = request.getfixturevalue("cell" if pooling == "last" else "mean_cell")
    model = request.getfixturevalue("embedder" if pooling == "last" else "averager")
    exact = request_for(determinism="DETERMINISM_EXACT")
    flags = ("--scheduler.max-num-batched-tokens=16", "--scheduler.max-num-seqs=8")
    with start_cell(model.directory, REFERENCE, EMBED, *flags) as other:
        assert vectors_of(await embed(other, exact)) == vectors_of(await embed(whole, exact))


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_a_group_of_two_gives_the_vectors_of_the_recipe(request: pytest.FixtureRequest, pooling: str) -> None:
    model = request.getfixturevalue("embedder" if pooling == "last" else "averager")
    with start_cell(model.directory, REFERENCE, EMBED, "--tp=2") as cell:
        assert_close(vectors_of(await embed(cell, request_for())), [model.vector(text) for text in TEXTS])


@pytest.mark.slow
async def test_fast_kernels_quantise_nothing(embedder: Embedder) -> None:
    with start_cell(embedder.directory, EMBED, "--worker.dtype=float32") as cell:
        assert_close(vectors_of(await embed(cell, request_for())), [embedder.vector(text) for text in TEXTS])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "scheduler"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_a_death_in_between_changes_no_bit(request: pytest.FixtureRequest, role: str, pooling: str) -> None:
    whole = request.getfixturevalue("cell" if pooling == "last" else "mean_cell")
    model = request.getfixturevalue("embedder" if pooling == "last" else "averager")
    texts = [f"{text} {number}" for number in range(60) for text in TEXTS]
    exact = request_for(texts, determinism="DETERMINISM_EXACT")
    expected = vectors_of(await embed(whole, exact))
    with run_split_cell(model.directory, REFERENCE, "--worker.task=embed", *IN_SEVERAL_STEPS) as split:
        await split.wait_until_serving("tokenizer")
        call = asyncio.create_task(embed(split, exact))
        # Their vectors are known.
        await split.wait_until_finished(3)
        split.kill(role)
        split.start(role)
        response = await call
    assert vectors_of(response) == expected
    assert any(embedding.recovery.resume_count for embedding in response.embeddings)
