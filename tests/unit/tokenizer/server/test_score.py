"""`Score`: each item is a request for one token, whose labels' probabilities are scores. The test plays the cell."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.server.score import MAX_IN_FLIGHT
from shared.errors import NumericError
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.key_files import key_line, write_keys
from tests.support.models.tiny_tokenizer import VOCABULARY_SIZE
from tests.support.tokenizer.exchange_peer import Position, Row, make_end, make_error_end, read_column
from tests.support.tokenizer.rerankers import SHORT_TEMPLATE
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service
from tests.unit.tokenizer.server.test_servicer import violations

MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS
LABELS = [91, 80]


@pytest.fixture
async def scorer(tmp_path: Path, model_dir: Path) -> AsyncIterator[Service]:
    """A service whose model has a recipe, linked to its cell."""
    template = tmp_path / "template.jinja"
    template.write_text(SHORT_TEMPLATE, encoding="utf-8")
    async with run_tokenizer_service(
        model_dir, tmp_path, score_template=str(template), score_labels=("y", "n")
    ) as running:
        await running.link()
        yield running


def pairs(documents: Sequence[str], *queries: str, **fields: Any) -> tokenizer_pb2.ScoreRequest:
    return tokenizer_pb2.ScoreRequest(
        pairs=tokenizer_pb2.ScorePairs(queries=queries or ("q",), documents=documents), **fields
    )


def prompts(*texts: str, labels: Sequence[int] = (70, 71), **fields: Any) -> tokenizer_pb2.ScoreRequest:
    items = [tokenizer_pb2.Prompt(text=text) for text in texts]
    return tokenizer_pb2.ScoreRequest(prompts={"prompts": items}, label_token_ids=labels, **fields)


def answer(
    service: Service, submit: exchange_pb2.Submit, *logprobs: float, token_id: int = 70, num_cached: int = 0
) -> None:
    """Have the cell draw a token, and tell what the labels' log-probabilities are."""
    labels = read_column(submit.options.logprob_token_ids)
    entries = [(token_id, -0.5), *zip(labels, logprobs, strict=True)]
    row = Row(
        submit.handle,
        0,
        [token_id],
        num_cached_tokens=num_cached,
        logprobs=[Position(1, entries, tuple(range(2, 2 + len(labels))))],
    )
    service.peer.send(row, ends=[make_end(submit.handle, MAX_TOKENS, 1)])


async def refusal(call: Any) -> tuple[grpc.StatusCode, str | None, dict[str, str]]:
    """The status, the reason and the fields of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), reason_of(status_from_rpc_error(caught.value)), violations(caught.value)


async def test_each_document_is_rated_by_the_labels_after_its_prompt(scorer: Service) -> None:
    request = pairs(["a", "bb"], request_id="mine", cache_salt="salt", priority="PRIORITY_LOW")
    request.pairs.instruction = "find"
    call = scorer.stub.Score(request)
    submits = []
    for index, logprobs in enumerate([(-1.0, -3.0), (-9.0, -2.0)]):
        submit = await scorer.peer.submits.get()
        submits.append(submit)
        answer(scorer, submit, *logprobs, num_cached=index)
    response = await call
    first = submits[0]
    assert [submit.request_id for submit in submits] == ["mine-0", "mine-1"]
    assert (first.max_tokens, first.temperature, first.ignore_eos, first.n) == (1, 0.0, True, 1)
    assert (first.cache_salt, first.priority) == (b"salt", common_pb2.PRIORITY_LOW)
    assert read_column(first.options.logprob_token_ids) == LABELS == list(response.label_token_ids)
    texts = [
        (await scorer.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=read_column(submit.prompt_token_ids))))
        for submit in submits
    ]
    # Control tokens, which are not shown, are between the messages.
    assert [each.text for each in texts] == ["system\nfindquery\nqdocument\na", "system\nfindquery\nqdocument\nbb"]
    assert [item.score for item in response.items] == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(7))])
    for item in response.items:
        assert sum(item.probabilities) == pytest.approx(1)
        assert item.score == item.probabilities[0]
    assert [list(item.logprobs) for item in response.items] == [[-1, -3], [-9, -2]]
    lengths = [len(read_column(submit.prompt_token_ids)) for submit in submits]
    assert [(item.usage.num_prompt_tokens, item.usage.num_cached_tokens) for item in response.items] == [
        (lengths[0], 0),
        (lengths[1], 1),
    ]
    assert response.usage == common_pb2.Usage(
        num_prompt_tokens=sum(lengths), num_cached_tokens=1, num_completion_tokens=2
    )
    assert (response.request_id, response.model) == ("mine", "tiny")


async def test_control_tokens_in_texts_are_text(scorer: Service) -> None:
    call = scorer.stub.Score(pairs(["<|im_end|>"], "<|im_start|>x"))
    submit = await scorer.peer.submits.get()
    plain = scorer.stub.Score(pairs(["a"], "b"))
    other = await scorer.peer.submits.get()
    control = [[each for each in read_column(s.prompt_token_ids) if each in (1, 2)] for s in (submit, other)]
    assert control[0] == control[1] == [1, 2, 1, 2, 1]
    call.cancel()
    plain.cancel()


async def test_each_document_may_have_its_query(scorer: Service) -> None:
    call = scorer.stub.Score(pairs(["a", "bb"], "first", "second"))
    token_ids = []
    for _ in range(2):
        submit = await scorer.peer.submits.get()
        token_ids.append(read_column(submit.prompt_token_ids))
        answer(scorer, submit, -1, -1)
    assert [item.score for item in (await call).items] == [0.5, 0.5]
    decoded = [
        (await scorer.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=each))).text for each in token_ids
    ]
    assert decoded == ["query\nfirstdocument\na", "query\nseconddocument\nbb"]


async def test_prompts_are_rated_by_the_requests_labels(service: Service) -> None:
    call = service.stub.Score(prompts("x", "y", labels=[5, 6, 7]))
    for _ in range(2):
        submit = await service.peer.submits.get()
        assert read_column(submit.options.logprob_token_ids) == [5, 6, 7]
        answer(service, submit, -2, -2, -2)
    response = await call
    assert [list(item.probabilities) for item in response.items] == [pytest.approx([1 / 3] * 3)] * 2
    assert list(response.label_token_ids) == [5, 6, 7]


async def test_probabilities_may_be_those_among_all_tokens(service: Service) -> None:
    call = service.stub.Score(prompts("x", labels=[5], over_vocabulary=True))
    answer(service, await service.peer.submits.get(), -2.0)
    [item] = (await call).items
    assert item.score == pytest.approx(math.exp(-2))
    assert list(item.probabilities) == [item.score]


async def test_very_unlikely_labels_still_add_up_to_one(service: Service) -> None:
    call = service.stub.Score(prompts("x"))
    answer(service, await service.peer.submits.get(), -5000.0, -5001.0)
    [item] = (await call).items
    assert item.score == pytest.approx(1 / (1 + math.exp(-1)))


async def test_the_first_item_is_alone_and_then_a_few_are_in_flight(service: Service) -> None:
    num_items = 2 * MAX_IN_FLIGHT
    call = service.stub.Score(prompts(*("x" * (1 + index % 5) for index in range(num_items))))
    first = await service.peer.submits.get()
    # What comes after it in the stream shows that nothing else was sent.
    neighbour, other = await service.begin(tokenizer_pb2.GenerateRequest(text="y"))
    assert other.request_id.count("-") == 0
    answer(service, first, -1, -1)
    in_flight = [await service.peer.submits.get() for _ in range(MAX_IN_FLIGHT)]
    again, other = await service.begin(tokenizer_pb2.GenerateRequest(text="y"))
    assert other.request_id.count("-") == 0
    for number in range(1, num_items):
        # The newest one first: the order of ends does not matter.
        answer(service, in_flight.pop(), -1.0 * number, -1)
        if number + len(in_flight) < num_items - 1:
            in_flight.append(await service.peer.submits.get())
        assert len(in_flight) <= MAX_IN_FLIGHT
    response = await call
    assert len(response.items) == num_items
    assert response.usage.num_completion_tokens == num_items
    neighbour.cancel()
    again.cancel()


async def test_an_error_of_one_item_ends_all(service: Service) -> None:
    call = service.stub.Score(prompts("x", "y", "z"))
    answer(service, await service.peer.submits.get(), -1, -1)
    second, third = [await service.peer.submits.get() for _ in range(2)]
    end = make_error_end(third.handle, NumericError("the logits were not finite", step=4))
    service.peer.send(ends=[end])
    assert await refusal(call) == (grpc.StatusCode.INTERNAL, "NUMERIC_ERROR", {})
    assert await service.peer.aborts.get() == second.handle


async def test_a_cancelled_call_aborts_its_items(service: Service) -> None:
    call = service.stub.Score(prompts("x", "y", "z"))
    answer(service, await service.peer.submits.get(), -1, -1)
    handles = {(await service.peer.submits.get()).handle for _ in range(2)}
    call.cancel()
    assert {await service.peer.aborts.get() for _ in range(2)} == handles


async def test_a_passed_deadline_aborts_its_items(service: Service) -> None:
    call = service.stub.Score(prompts("x", "y"), timeout=2)
    submit = await service.peer.submits.get()
    assert await service.peer.aborts.get() == submit.handle
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_items_are_charged_to_the_tenant_within_its_limits(tmp_path: Path, model_dir: Path) -> None:
    keys = write_keys(tmp_path / "keys", key_line("one", max_in_flight=3))
    async with run_tokenizer_service(model_dir, tmp_path, client_keys=keys) as service:
        await service.link()
        metadata = (("x-api-key", "one"),)
        call = service.stub.Score(prompts(*"abcdefgh"), metadata=metadata)
        first = await service.peer.submits.get()
        answer(service, first, -1, -1)
        in_flight = [await service.peer.submits.get() for _ in range(3)]
        assert {each.tenant.name for each in (first, *in_flight)} == {"a"}
        neighbour = service.stub.Generate(tokenizer_pb2.GenerateRequest(text="y"), metadata=metadata)
        assert "-" not in (await service.peer.submits.get()).request_id
        for number in range(7):
            answer(service, in_flight.pop(0), -1, -1)
            if number < 4:
                in_flight.append(await service.peer.submits.get())
        assert len((await call).items) == 8
        neighbour.cancel()


async def test_an_id_is_not_in_flight_twice(service: Service) -> None:
    call = service.stub.Score(prompts("x", "y", request_id="same"))
    await service.peer.submits.get()
    for request_id in ("same", "same-1"):
        refused = service.stub.Score(prompts("x", request_id=request_id))
        assert (await refusal(refused))[:2] == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    call.cancel()


PAIR_REFUSALS = [
    (pairs([]), {"pairs.documents": "OUT_OF_RANGE"}),
    (pairs(["x"] * 1001), {"pairs.documents": "OUT_OF_RANGE"}),
    (pairs(["x", ""]), {"pairs.documents[1]": "PROMPT_EMPTY"}),
    (pairs(["x"], ""), {"pairs.queries[0]": "PROMPT_EMPTY"}),
    (pairs(["x", "y", "z"], "a", "b"), {"pairs.queries": "OUT_OF_RANGE"}),
    (pairs(["x"], label_token_ids=[1, 2]), {"label_token_ids": "OUT_OF_RANGE"}),
    (pairs(["x"], request_id="x" * 61), {"request_id": "OUT_OF_RANGE"}),
    (pairs(["x"], cache_salt="x" * 65), {"cache_salt": "OUT_OF_RANGE"}),
    (tokenizer_pb2.ScoreRequest(), {"items": "PROMPT_EMPTY"}),
    (tokenizer_pb2.ScoreRequest(pairs={"documents": ["x"]}), {"pairs.queries": "OUT_OF_RANGE"}),
    (prompts(), {"prompts.prompts": "OUT_OF_RANGE"}),
    (prompts(*["x"] * 1001), {"prompts.prompts": "OUT_OF_RANGE"}),
    (prompts("x", ""), {"prompts.prompts[1].text": "PROMPT_EMPTY"}),
    (prompts("x", labels=[]), {"label_token_ids": "OUT_OF_RANGE"}),
    (prompts("x", labels=[5]), {"label_token_ids": "OUT_OF_RANGE"}),
    (prompts("x", labels=[], over_vocabulary=True), {"label_token_ids": "OUT_OF_RANGE"}),
    (prompts("x", labels=range(21)), {"label_token_ids": "OUT_OF_RANGE"}),
    (prompts("x", labels=[5, 5]), {"label_token_ids": "OUT_OF_RANGE"}),
    (prompts("x", labels=[5, VOCABULARY_SIZE]), {"label_token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"}),
    (prompts("x", labels=[5, 2**32 - 1]), {"label_token_ids[1]": "TOKEN_ID_OUT_OF_RANGE"}),
]


async def test_every_bad_field_is_refused_by_its_name(scorer: Service) -> None:
    for request, fields in PAIR_REFUSALS:
        expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", fields)
        assert await refusal(scorer.stub.Score(request)) == expected, fields
    # Nothing of them has reached the cell.
    call, submit = await scorer.begin(tokenizer_pb2.GenerateRequest(text="y"))
    assert submit.handle == 1
    call.cancel()


async def test_without_a_recipe_pairs_are_refused(service: Service) -> None:
    assert (await service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())).score_recipe == ""
    code, reason, fields = await refusal(service.stub.Score(pairs(["x"])))
    assert (code, reason, fields) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        {"pairs": "OUT_OF_RANGE"},
    )


@pytest.mark.parametrize(
    ("request_message", "expected"),
    [
        (pairs(["x"], model="other"), (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", {})),
        (pairs(["1" * 300]), (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", {})),
        # Each document has the query in its prompt.
        (pairs(["x"] * 1000, "y" * 3200), (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE", {})),
        (pairs(["x"], determinism="DETERMINISM_EXACT"), (grpc.StatusCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE", {})),
    ],
)
async def test_what_cannot_be_rated_is_refused(
    scorer: Service, request_message: tokenizer_pb2.ScoreRequest, expected: tuple[Any, ...]
) -> None:
    assert await refusal(scorer.stub.Score(request_message)) == expected


async def test_the_model_info_says_which_recipe_there_is(scorer: Service) -> None:
    info = await scorer.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
    assert info.score_recipe == "setting"


async def test_one_line_of_the_log_tells_of_all_items(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    call = service.stub.Score(prompts("x", "y", request_id="mine"))
    for _ in range(2):
        answer(service, await service.peer.submits.get(), -1, -1)
    await call
    [line] = [record for record in caplog.records if record.message == "request ended"]
    assert vars(line)["request_id"] == "mine"
    assert vars(line)["num_completion_tokens"] == 2
