"""`Embed`: each item is a request for its prompt's vector, which is cut and normalised. The test plays the cell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from lockstep.internal.v1 import exchange_pb2, sampling_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.server.items import MAX_IN_FLIGHT
from shared.errors import NumericError
from tests.support.clients.key_files import key_line, write_keys
from tests.support.models.tiny_tokenizer import ENDOFTEXT, VOCABULARY_SIZE
from tests.support.tokenizer.embedders import MEAN, PROMPTS, append_token, write_tokenizer_of_embedder
from tests.support.tokenizer.exchange_peer import Row, make_end, make_error_end, make_outputs, read_column
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service
from tests.unit.tokenizer.server.test_score import refusal

MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS
SIZE = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_of_embedder(tmp_path_factory.mktemp("embedder") / "tiny", SIZE)


@pytest.fixture
async def embedder(tmp_path: Path, directory: Path) -> AsyncIterator[Service]:
    """A service whose model has a recipe, linked to a cell that embeds."""
    # Apart from the sockets of a service that generates.
    sockets = tmp_path / "e"
    sockets.mkdir()
    async with run_tokenizer_service(directory, sockets, task="embed") as running:
        await running.link()
        yield running


def texts(*items: str, **fields: Any) -> tokenizer_pb2.EmbedRequest:
    prompts = [tokenizer_pb2.Prompt(text=text) for text in items]
    return tokenizer_pb2.EmbedRequest(prompts={"prompts": prompts}, **fields)


def tokens(*items: Sequence[int], **fields: Any) -> tokenizer_pb2.EmbedRequest:
    prompts = [tokenizer_pb2.Prompt(tokens={"token_ids": item}) for item in items]
    return tokenizer_pb2.EmbedRequest(prompts={"prompts": prompts}, **fields)


def answer(service: Service, submit: exchange_pb2.Submit, *values: float, num_cached: int = 0) -> None:
    """Have the cell draw a token, and tell the prompt's vector."""
    row = Row(submit.handle, 0, [0], num_cached_tokens=num_cached)
    outputs = make_outputs(row, ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    if values:
        outputs.vectors.add(handle=submit.handle, values=np.array(values, "<f4").tobytes())
    service.peer.send_outputs(outputs)


async def text_of(service: Service, submit: exchange_pb2.Submit) -> str:
    request = tokenizer_pb2.DetokenizeRequest(token_ids=read_column(submit.prompt_token_ids))
    return str((await service.stub.Detokenize(request)).text)


async def test_each_text_gets_its_vector(embedder: Service) -> None:
    call = embedder.stub.Embed(texts("a", "bb", request_id="mine", cache_salt="salt", priority="PRIORITY_LOW"))
    submits = []
    for index, values in enumerate([(3.0, 4.0, 0.0), (0.0, 0.0, -2.0)]):
        submit = await embedder.peer.submits.get()
        submits.append(submit)
        answer(embedder, submit, *values, num_cached=index)
    response = await call
    first = submits[0]
    assert [submit.request_id for submit in submits] == ["mine-0", "mine-1"]
    assert (first.max_tokens, first.temperature, first.ignore_eos, first.n) == (1, 0.0, True, 1)
    assert (first.cache_salt, first.priority) == (b"salt", common_pb2.PRIORITY_LOW)
    assert first.options == sampling_pb2.SamplingOptions(pooling=sampling_pb2.POOLING_LAST)
    assert [await text_of(embedder, submit) for submit in submits] == ["a", "bb"]
    vectors = [list(each.values) for each in response.embeddings]
    assert vectors == [pytest.approx([0.6, 0.8, 0.0]), [0.0, 0.0, -1.0]]
    lengths = [len(read_column(submit.prompt_token_ids)) for submit in submits]
    assert response.usage == common_pb2.Usage(num_prompt_tokens=sum(lengths), num_cached_tokens=1)
    assert [each.usage.num_prompt_tokens for each in response.embeddings] == lengths
    assert (response.request_id, response.model) == ("mine", "tiny")


async def test_dimensions_cut_a_vector_and_normalise_it_again(embedder: Service) -> None:
    call = embedder.stub.Embed(texts("a", dimensions=2))
    answer(embedder, await embedder.peer.submits.get(), 3.0, 4.0, 12.0)
    [embedding] = (await call).embeddings
    assert list(embedding.values) == pytest.approx([0.6, 0.8])


async def test_a_vector_of_zeros_stays_one(embedder: Service) -> None:
    call = embedder.stub.Embed(texts("a"))
    answer(embedder, await embedder.peer.submits.get(), 0.0, 0.0, 0.0)
    [embedding] = (await call).embeddings
    assert list(embedding.values) == [0.0] * SIZE


@pytest.mark.parametrize(
    ("fields", "prefix"),
    [
        ({}, "default: "),
        ({"input_type": "INPUT_TYPE_QUERY"}, "query: "),
        ({"input_type": "INPUT_TYPE_DOCUMENT"}, "passage: "),
        ({"prompt_name": "web"}, "default: "),
        ({"prompt_name": "query"}, "query: "),
        ({"prompt_name": "document"}, ""),
    ],
)
async def test_a_text_gets_the_prompt_that_is_asked_for(tmp_path: Path, fields: dict[str, Any], prefix: str) -> None:
    prompts = {"query": "query: ", "passage": "passage: ", "web": "default: "}
    directory = write_tokenizer_of_embedder(
        tmp_path / "m", SIZE, pooling=MEAN, config={"prompts": prompts, "default_prompt_name": "web"}
    )
    end = append_token(directory, ENDOFTEXT)
    async with run_tokenizer_service(directory, tmp_path, task="embed") as service:
        await service.link()
        call = service.stub.Embed(texts("a text", **fields))
        submit = await service.peer.submits.get()
        assert await text_of(service, submit) == f"{prefix}a text"
        # What the tokenizer appends is a part of it.
        assert read_column(submit.prompt_token_ids)[-1] == end
        assert submit.options.pooling == sampling_pb2.POOLING_MEAN
        call.cancel()


async def test_token_ids_are_taken_as_they_are(embedder: Service) -> None:
    call = embedder.stub.Embed(tokens([5, 6, 7], [8], input_type="INPUT_TYPE_QUERY"))
    for expected in ([5, 6, 7], [8]):
        submit = await embedder.peer.submits.get()
        assert read_column(submit.prompt_token_ids) == expected
        answer(embedder, submit, 1.0, 0.0, 0.0)
    await call


async def test_only_the_last_tokens_are_kept(embedder: Service) -> None:
    for request in (tokens([5, 6, 7], truncate_prompt_tokens=2), tokens([6, 7], truncate_prompt_tokens=9)):
        call = embedder.stub.Embed(request)
        assert read_column((await embedder.peer.submits.get()).prompt_token_ids) == [6, 7]
        call.cancel()
    call = embedder.stub.Embed(texts("1" * 300, truncate_prompt_tokens=3))
    assert len(read_column((await embedder.peer.submits.get()).prompt_token_ids)) == 3
    call.cancel()


async def test_few_items_are_in_flight(embedder: Service) -> None:
    num_items = 2 * MAX_IN_FLIGHT
    call = embedder.stub.Embed(texts(*["x"] * num_items))
    answer(embedder, await embedder.peer.submits.get(), 1.0, 0.0, 0.0)
    in_flight = [await embedder.peer.submits.get() for _ in range(MAX_IN_FLIGHT)]
    neighbour = embedder.stub.Embed(texts("y"))
    # What comes after it in the stream shows that nothing else was sent.
    assert "-" not in (await embedder.peer.submits.get()).request_id
    for number in range(1, num_items):
        answer(embedder, in_flight.pop(), float(number), 0.0, 0.0)
        if number + len(in_flight) < num_items - 1:
            in_flight.append(await embedder.peer.submits.get())
    assert len((await call).embeddings) == num_items
    neighbour.cancel()


async def test_an_error_of_one_item_ends_all(embedder: Service) -> None:
    call = embedder.stub.Embed(texts("x", "y", "z"))
    answer(embedder, await embedder.peer.submits.get(), 1.0, 0.0, 0.0)
    second, third = [await embedder.peer.submits.get() for _ in range(2)]
    embedder.peer.send(ends=[make_error_end(third.handle, NumericError("the logits were not finite", step=4))])
    assert await refusal(call) == (grpc.StatusCode.INTERNAL, "NUMERIC_ERROR", {})
    assert await embedder.peer.aborts.get() == second.handle


@pytest.mark.parametrize(
    ("values", "reason"), [((), "INTERNAL"), ((1.0, 2.0), "INTERNAL"), ((1.0, float("nan"), 0.0), "NUMERIC_ERROR")]
)
async def test_what_is_no_vector_is_not_passed_on(embedder: Service, values: Sequence[float], reason: str) -> None:
    call = embedder.stub.Embed(texts("x"))
    answer(embedder, await embedder.peer.submits.get(), *values)
    assert await refusal(call) == (grpc.StatusCode.INTERNAL, reason, {})


async def test_items_are_charged_to_the_tenant_within_its_limits(tmp_path: Path, directory: Path) -> None:
    keys = write_keys(tmp_path / "keys", key_line("one", max_in_flight=3))
    async with run_tokenizer_service(directory, tmp_path, task="embed", client_keys=keys) as service:
        await service.link()
        call = service.stub.Embed(texts(*"abcd"), metadata=(("x-api-key", "one"),))
        first = await service.peer.submits.get()
        answer(service, first, 1.0, 0.0, 0.0)
        in_flight = [await service.peer.submits.get() for _ in range(3)]
        assert {each.tenant.name for each in (first, *in_flight)} == {"a"}
        call.cancel()


BAD = [
    (texts(), {"prompts.prompts": "OUT_OF_RANGE"}),
    (tokenizer_pb2.EmbedRequest(), {"prompts.prompts": "OUT_OF_RANGE"}),
    (texts(*["x"] * 2049), {"prompts.prompts": "OUT_OF_RANGE"}),
    (texts("x", ""), {"prompts.prompts[1].text": "PROMPT_EMPTY"}),
    (tokens([5], []), {"prompts.prompts[1].tokens.token_ids": "PROMPT_EMPTY"}),
    (tokens([5], [VOCABULARY_SIZE]), {"prompts.prompts[1].tokens.token_ids[0]": "TOKEN_ID_OUT_OF_RANGE"}),
    (tokenizer_pb2.EmbedRequest(prompts={"prompts": [{}]}), {"prompts.prompts[0].prompt": "PROMPT_EMPTY"}),
    (texts("x", dimensions=0), {"dimensions": "OUT_OF_RANGE"}),
    (texts("x", dimensions=SIZE + 1), {"dimensions": "OUT_OF_RANGE"}),
    (texts("x", truncate_prompt_tokens=0), {"truncate_prompt_tokens": "OUT_OF_RANGE"}),
    (texts("x", prompt_name="other"), {"prompt_name": "OUT_OF_RANGE"}),
    (texts("x", prompt_name="query", input_type="INPUT_TYPE_QUERY"), {"prompt_name": "OUT_OF_RANGE"}),
    (texts("x", input_type=9), {"input_type": "OUT_OF_RANGE"}),
    (texts("x", request_id="x" * 60), {"request_id": "OUT_OF_RANGE"}),
    (texts("x", cache_salt="x" * 65), {"cache_salt": "OUT_OF_RANGE"}),
]


async def test_every_bad_field_is_refused_by_its_name(embedder: Service) -> None:
    for request, fields in BAD:
        expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", fields)
        assert await refusal(embedder.stub.Embed(request)) == expected, fields
    chat = tokenizer_pb2.Prompt(chat={"messages": [{"role": "ROLE_USER", "content": "x"}]})
    code, _, fields = await refusal(embedder.stub.Embed(tokenizer_pb2.EmbedRequest(prompts={"prompts": [chat]})))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, {"prompts.prompts[0].chat": "OUT_OF_RANGE"})


@pytest.mark.parametrize(
    ("request_message", "expected"),
    [
        (texts("x", model="other"), (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", {})),
        (texts("1" * 300), (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", {})),
        # Each text has the prompt before it.
        (
            texts(*["1" * 1500] * 2048, prompt_name="query"),
            (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE", {}),
        ),
        (texts("x", determinism="DETERMINISM_EXACT"), (grpc.StatusCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE", {})),
    ],
)
async def test_what_has_no_vector_is_refused(
    embedder: Service, request_message: tokenizer_pb2.EmbedRequest, expected: tuple[Any, ...]
) -> None:
    assert len(PROMPTS["query"]) > 40
    assert await refusal(embedder.stub.Embed(request_message)) == expected


async def test_what_the_model_is_not_served_for_is_refused_on_its_name(embedder: Service, service: Service) -> None:
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", {"model": "OUT_OF_RANGE"})
    assert await refusal(service.stub.Embed(texts("x"))) == expected
    prompts = {"prompts": [tokenizer_pb2.Prompt(text="x")]}
    generate = tokenizer_pb2.GenerateRequest(text="x")
    for call in (
        embedder.stub.Complete(tokenizer_pb2.CompleteRequest(request=generate)),
        embedder.stub.Score(tokenizer_pb2.ScoreRequest(prompts=prompts, label_token_ids=[5, 6])),
        embedder.stub.Generate(generate).read(),
    ):
        assert await refusal(call) == expected


async def test_a_tokenizer_without_the_recipe_makes_no_vectors(tmp_path: Path, model_dir: Path) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, task="embed") as service:
        await service.link()
        code, reason, fields = await refusal(service.stub.Embed(texts("x")))
        assert (code, reason, fields) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            {"model": "OUT_OF_RANGE"},
        )


async def test_the_model_info_says_how_many_numbers_a_vector_has(embedder: Service, service: Service) -> None:
    request = tokenizer_pb2.GetModelInfoRequest()
    assert (await embedder.stub.GetModelInfo(request)).num_dimensions == SIZE
    assert (await service.stub.GetModelInfo(request)).num_dimensions == 0
