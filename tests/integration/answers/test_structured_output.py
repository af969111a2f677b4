"""Structured output through a whole cell: complete texts are valid, and hostile grammars affect only themselves."""

from __future__ import annotations

import asyncio
import json
import random

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.cells.cell import Cell
from tests.support.clients.client import Client, Completion, connect
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.tokenizer.grammar_texts import CLOSERS
from tests.support.tokenizer.json_schema_suite import SuiteSchema, read_suite

# The least share of texts that end.
MIN_ENDED = 0.8
NUM_AT_ONCE = 64
# Strong enough for the model to end a text now and then, and weak enough for varied texts.
CLOSER_BIAS = 4.0

Form = tokenizer_pb2.StructuredOutput


def request_for(form: Form, seed: int) -> tokenizer_pb2.GenerateRequest:
    """A request with a grammar at the highest temperature."""
    tokenizer = tiny_tokenizer()
    ids = (tokenizer.token_to_id(text.replace(" ", "Ġ")) for text in CLOSERS)
    bias = {token_id: CLOSER_BIAS for token_id in ids if token_id is not None}
    sampling = common_pb2.SamplingParams(temperature=2.0, max_tokens=400, seed=seed, logit_bias=bias)
    return tokenizer_pb2.GenerateRequest(text="Hello", structured_output=form, sampling=sampling)


def violation_reasons(error: grpc.aio.AioRpcError) -> list[str]:
    """The reasons of the field violations."""
    status = rpc_status.from_call(error)
    assert status is not None
    reasons = []
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            reasons += [violation.reason for violation in bad_request.field_violations]
    return reasons


async def generate(client: Client, form: Form, seed: int) -> Completion | list[str]:
    """The answer, or the reasons for which the form is refused."""
    try:
        return await client.generate(request_for(form, seed))
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return violation_reasons(error)


async def first_supported(
    client: Client, schemas: list[SuiteSchema], count: int
) -> list[tuple[SuiteSchema, Completion]]:
    """The answers for the first `count` schemas that are not refused."""
    answers: list[tuple[SuiteSchema, Completion]] = []
    remaining = iter(enumerate(schemas))

    async def take_turns() -> None:
        for seed, schema in remaining:
            if len(answers) >= count:
                return
            answer = await generate(client, Form(json_schema=schema.source), seed)
            if isinstance(answer, Completion):
                answers.append((schema, answer))
            else:
                assert answer in (["GRAMMAR_INVALID"], ["GRAMMAR_TOO_COMPLEX"]), schema.name

    await asyncio.gather(*(take_turns() for _ in range(NUM_AT_ONCE)))
    return answers[:count]


@pytest.mark.parametrize(
    "num_schemas", [pytest.param(150, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.proof)]
)
async def test_of_random_schemas_every_text_that_ends_fits(tiny_cell: Cell, num_schemas: int) -> None:
    schemas = read_suite()
    random.Random(5).shuffle(schemas)
    async with connect(tiny_cell) as client:
        answers = await first_supported(client, schemas, num_schemas)
    assert len(answers) == num_schemas
    ended = [(schema, answer) for schema, answer in answers if answer.reason == "EOS"]
    assert {answer.reason for _, answer in answers} <= {"EOS", "MAX_TOKENS"}
    assert [(schema.name, answer.text) for schema, answer in ended if not schema.is_fit(answer.text)] == []
    assert len(ended) >= MIN_ENDED * num_schemas


async def test_an_object_has_the_keys_that_its_schema_names_and_ends(tiny_cell: Cell) -> None:
    name = {"type": "string", "maxLength": 4}
    properties = {"name": name, "pet": {"type": "object", "properties": {"name": name}, "required": ["name"]}}
    schema = {"type": "object", "properties": properties, "required": ["name", "pet"]}
    async with connect(tiny_cell) as client:
        answers = await asyncio.gather(
            *(client.generate(request_for(Form(json_schema=json.dumps(schema)), seed)) for seed in range(8))
        )
    assert {answer.reason for answer in answers} == {"EOS"}
    values = [json.loads(answer.text) for answer in answers]
    assert [(list(value), list(value["pet"])) for value in values] == [(["name", "pet"], ["name"])] * len(values)


@pytest.mark.slow
async def test_a_text_that_costs_too_much_to_follow_ends_with_an_error_and_not_as_if_it_were_complete(
    tiny_cell: Cell,
) -> None:
    letter = tiny_tokenizer().token_to_id("a")
    assert letter is not None
    request = request_for(Form(grammar='start: s\ns: s s | "a"'), 1)
    request.sampling.logit_bias[letter] = 100.0
    async with connect(tiny_cell) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(request)
        assert (await client.generate(request_for(Form(regex="yes|no"), 1))).text in ("yes", "no")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violation_reasons(caught.value) == ["GRAMMAR_TOO_COMPLEX"]


def hostile_form(number: int) -> Form:
    """One of a dozen kinds of hostile grammar; `number` also makes it unique within its kind."""
    kinds = [
        Form(regex=f"(a|a)*{{1000}}b{number}"),
        Form(regex=f"((((a{{99}}){{99}}){{99}}){{99}}){number}"),
        Form(regex=f".*a.{{30}}b.{{30}}c.*{number}"),
        Form(regex="(" * (1000 + number)),
        Form(json_schema='{"items":' * (500 + number) + "{}" + "}" * (500 + number)),
        Form(json_schema=json.dumps({"type": "integer", "multipleOf": 999983, "title": str(number)})),
        Form(
            json_schema=json.dumps({"allOf": [{"anyOf": [{"const": i * j} for j in range(9)]} for i in range(number)]})
        ),
        Form(json_schema=json.dumps({"enum": [f"{number} {i}" for i in range(5000)]})),
        Form(grammar=f'start: s "{number}"\ns: s s s | "a" | ""'),
        Form(grammar=f'start: s\ns: s "{number}" s | "a" s?'),
        Form(grammar="start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(30)) + f'\nT30: "{number}"'),
        Form(grammar="root ::= " + "(" * (1000 + number)),
    ]
    return kinds[number % len(kinds)]


# At least five of each kind.
@pytest.mark.parametrize(
    "num_hostile", [pytest.param(60, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.proof)]
)
async def test_many_hostile_grammars_at_once_disturb_no_ordinary_request(tiny_cell: Cell, num_hostile: int) -> None:
    plain = [request_for(Form(), seed) for seed in range(32)]
    for request in plain:
        request.ClearField("structured_output")
    async with connect(tiny_cell) as client:
        alone = await client.generate_all(plain)
        hostile = asyncio.gather(*(generate(client, hostile_form(number), number) for number in range(num_hostile)))
        beside = await client.generate_all(plain)
        assert not hostile.done()
        outcomes = await hostile
        after = await client.generate(request_for(Form(regex="yes|no"), 1))
    assert [answer.reason for answer in beside] == [answer.reason for answer in alone]
    assert [len(answer.token_ids) for answer in beside] == [len(answer.token_ids) for answer in alone]
    # Some are harmless after all: accepted grammars are computed, the others are refused.
    refused = [outcome for outcome in outcomes if not isinstance(outcome, Completion)]
    assert len(refused) >= num_hostile / 2
    assert all(reasons in (["GRAMMAR_INVALID"], ["GRAMMAR_TOO_COMPLEX"]) for reasons in refused)
    assert after.text in ("yes", "no")
