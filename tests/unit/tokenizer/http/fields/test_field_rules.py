"""One table of fields for all routes: what is honoured, what is named as without effect, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.request import CountTokensFields, MessagesFields, read_messages_request
from services.tokenizer.http.fields.api_request import ApiRequest
from services.tokenizer.http.fields.field_rules import DONE_ANYWAY, HARMLESS, REFUSED, WITHOUT_EFFECT
from services.tokenizer.http.fields.fields import Fields
from services.tokenizer.http.openai.chat_request import ChatFields, read_chat_request
from services.tokenizer.http.openai.completion_request import CompletionFields, read_completion_request
from services.tokenizer.http.openai_responses.request import ResponseFields, read_response_request
from services.tokenizer.http.refusals import HttpError
from tests.support.tokenizer.http_client import MESSAGES, run_http_service

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
Door = tuple[Callable[..., ApiRequest], dict[str, Any], type[Fields]]
DOORS: dict[str, Door] = {
    "chat": (read_chat_request, {"messages": MESSAGES}, ChatFields),
    "completion": (read_completion_request, {"prompt": "hi"}, CompletionFields),
    "responses": (read_response_request, {"input": "hi"}, ResponseFields),
    "messages": (read_messages_request, {"messages": MESSAGES, "max_tokens": 100}, MessagesFields),
}
OF_CHATS = {name: DOORS[name] for name in ("chat", "responses", "messages")}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))
every_chat = pytest.mark.parametrize("door", OF_CHATS.values(), ids=list(OF_CHATS))


def read(door: Door, *, is_lenient: bool = False, **fields: Any) -> ApiRequest:
    reader, body, _ = door
    return reader(body | fields, "r", is_lenient=is_lenient)


def refusal(door: Door, **fields: Any) -> str | None:
    with pytest.raises(HttpError) as caught:
        read(door, **fields)
    assert caught.value.status == 400
    return caught.value.param


def test_a_name_is_in_one_list_and_no_route_reads_what_has_no_effect_in_another_way() -> None:
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()
    assert not DONE_ANYWAY.keys() & (WITHOUT_EFFECT.keys() | REFUSED.keys())
    assert HARMLESS.keys() <= WITHOUT_EFFECT.keys()


def nested(path: str, value: Any) -> dict[str, Any]:
    """Fields with a value at a path of the table."""
    outer, _, inner = path.partition(".")
    needed: dict[str, dict[str, Any]] = {
        "stream_options": {"stream": True},
        "structured_outputs": {"structured_outputs": {"regex": "a"}},
        "thinking": {"thinking": {"type": "enabled"}},
    }
    others = needed.get(outer, {})
    if not inner:
        return others | {outer: value}
    return others | {outer: {**others.get(outer, {}), inner: value}}


def reads(door: Door, name: str) -> bool:
    return name in {each.alias or key for key, each in door[2].model_fields.items()}


@pytest.mark.parametrize("path", WITHOUT_EFFECT)
@every_door
def test_a_field_without_effect_is_named_by_every_route_and_changes_nothing(door: Door, path: str) -> None:
    outer, _, inner = path.partition(".")
    if inner and not reads(door, outer):
        pytest.skip("the route has no such object, and refuses it as a whole")
    value = {"thinking.budget_tokens": 5, "max_tool_calls": 5, "metadata": {"a": "b"}, "client_metadata": {"a": "b"}}
    given = nested(path, value.get(path, "auto"))
    api = read(door, seed=1, **given)
    assert path in api.ignored
    assert path not in read(door, seed=1, **nested(path, None)).ignored


@pytest.mark.parametrize("path", REFUSED)
@every_door
def test_a_field_that_cannot_be_honoured_is_refused_unless_it_asks_for_nothing(door: Door, path: str) -> None:
    outer, _, inner = path.partition(".")
    if (inner and not reads(door, outer)) or (not inner and reads(door, outer)):
        pytest.skip("the route has no such object, or honours the field")
    assert refusal(door, **nested(path, {"x": 1})) == path
    for value in (None, *REFUSED[path]):
        assert read(door, **nested(path, value)).ignored == []
    # It is known, so that leniency does not reach it.
    with pytest.raises(HttpError):
        read(door, is_lenient=True, **nested(path, {"x": 1}))


@every_door
def test_an_unknown_field_is_refused_by_its_name_or_named_where_that_is_allowed(door: Door) -> None:
    assert refusal(door, nonsense=0) == "nonsense"
    assert read(door, is_lenient=True, nonsense=0).ignored == ["nonsense"]
    assert read(door, nonsense=None).ignored == []
    # Some name that nobody can put into a header.
    assert refusal(door, **{"ü\n" * 1000: 1})


@every_door
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"response_format": {"type": "json_object", "draft": 7}}, "response_format.draft"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "draft": 7}}},
            "response_format.json_schema.draft",
        ),
        ({"structured_outputs": {"regex": "a", "flags": "i"}}, "structured_outputs.flags"),
    ],
)
def test_an_unknown_field_inside_of_a_form_is_refused_too(door: Door, fields: dict[str, Any], place: str) -> None:
    assert refusal(door, **fields) == place
    assert read(door, is_lenient=True, **fields).ignored == [place]


@pytest.mark.parametrize(
    ("door", "fields", "place"),
    [
        ("responses", {"reasoning": {"effort": "low", "x": 1}}, "reasoning.x"),
        ("responses", {"text": {"x": 1}}, "text.x"),
        ("responses", {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        ("messages", {"thinking": {"type": "enabled", "x": 1}}, "thinking.x"),
        ("messages", {"output_config": {"x": 1}}, "output_config.x"),
        ("chat", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("chat", {"tool_choice": {"type": "auto", "x": 1}}, "tool_choice.x"),
        ("messages", {"tool_choice": {"type": "auto", "x": 1}}, "tool_choice.x"),
    ],
)
def test_an_unknown_field_inside_of_another_is_refused(door: str, fields: dict[str, Any], place: str) -> None:
    assert refusal(DOORS[door], **fields) == place


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("door", "fields", "place"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content[0].x",
        ),
        ("chat", {"tools": [TOOL | {"x": 1}]}, "tools[0].x"),
        ("responses", {"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
        ("responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "x": 1}]},
         "input[0].x"),
        ("messages", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "x": 1}]}, "tools[0].x"),
    ],
)  # fmt: skip
def test_what_clients_send_back_is_never_refused_for_a_name(door: str, fields: dict[str, Any], place: str) -> None:
    assert place in read(DOORS[door], **fields).ignored


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
     {"json_schema": json.dumps(SCHEMA)}),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
     {"json_schema": json.dumps(SCHEMA)}),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ({"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        {"json_schema": json.dumps(SCHEMA)},
    ),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"guided_choice": ["a", "b"]}, {"choices": {"texts": ["a", "b"]}}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choices": {"texts": ["a", "b"]}}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "form"), FORMS)
@every_door
def test_a_form_is_the_same_under_every_name_by_every_route(
    door: Door, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    found = read(door, **fields).message.structured_output
    found.ClearField("strict")
    assert found == tokenizer_pb2.StructuredOutput(**form)
    [name] = fields
    other = "guided_regex" if name != "guided_regex" else "regex"
    assert refusal(door, **fields, **{other: "x"}) in (name, other)


@pytest.mark.parametrize(("fields", "form"), FORMS)
@every_door
def test_a_form_that_is_wrong_is_named_as_it_was_given(
    door: Door, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    api = read(door, **fields)
    [name], [kind] = fields, form
    inner = "structured_output.choices.texts" if kind == "choices" else f"structured_output.{kind}"
    assert api.names(inner).split(".")[0] == name
    assert api.names("structured_output") == name


def variables(door: Door, **fields: Any) -> dict[str, Any]:
    text = read(door, **fields).message.chat.template_variables
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled"}}, ON),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, ON | {"clear_thinking": False}),
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True}, ON),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning": {"effort": "none"}}, OFF),
        ({"reasoning_effort": "high"}, ON | {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "high"}}, ON | {"reasoning_effort": "high"}),
        ({"enable_thinking": False, "reasoning_effort": "high"}, OFF),
        ({"chat_template_kwargs": {"thinking": False, "x": 1}}, {"thinking": False, "x": 1}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
            ON | {"reasoning_effort": "x"},
        ),
    ],
)
@every_chat
def test_thinking_is_switched_in_every_way_by_every_route(
    door: Door, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert variables(door, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "enable_thinking"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
@every_chat
def test_switches_that_contradict_each_other_are_refused(door: Door, fields: dict[str, Any], place: str) -> None:
    assert refusal(door, **fields) == place


@pytest.mark.parametrize(
    "name", ["enable_thinking", "thinking", "reasoning_effort", "chat_template_kwargs", "messages"]
)
def test_a_completion_has_no_template_to_tell(name: str) -> None:
    assert refusal(DOORS["completion"], **{name: {}}) == name


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@every_door
def test_a_length_has_every_name_by_every_route_and_the_lowest_counts(door: Door, name: str) -> None:
    def length(**fields: Any) -> int | None:
        api = read(door, **fields)
        return api.message.sampling.max_tokens or api.default_max_tokens

    assert length(**{name: 7}) == 7
    assert length(**{"max_tokens": 9, name: 7}) == 7
    assert length(**{"max_tokens": 9, "max_completion_tokens": 8, "max_output_tokens": 10, name: 5.0}) == 5


@every_door
def test_integers_may_be_written_as_floats_and_a_seed_of_minus_one_is_drawn(door: Door) -> None:
    sampling = read(door, seed=5.0, top_k=json.loads("2e0"), max_tokens=7.0, stop_token_ids=[3.0]).message.sampling
    assert (sampling.seed, sampling.top_k, list(sampling.stop_token_ids)) == (5, 2, [3])
    assert refusal(door, top_k=2.5) == "top_k"
    seeds = {read(door, seed=-1).message.sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert read(door, seed=-2).message.sampling.seed == 2**64 - 2


def test_ids_may_be_written_as_floats() -> None:
    message = read(DOORS["completion"], prompt=[5.0, 6]).message
    assert list(message.tokens.token_ids) == [5, 6]
    assert refusal(DOORS["completion"], prompt=[5.5]) == "prompt"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
async def test_the_operator_may_let_unknown_fields_pass(model_dir: Path, tmp_path: Path, route: str) -> None:
    body = {"messages": MESSAGES, "nonsense": 1, **({} if route.endswith("tokenize") else {"max_tokens": 5})}
    async with run_http_service(model_dir, tmp_path) as http:
        answer = await http.post(route, body)
        assert answer.status == 400
        assert "nonsense" in answer.error["message"]
    async with run_http_service(model_dir, tmp_path, lenient_fields=True) as http:
        if route.endswith(("/tokenize", "/count_tokens")):
            assert (await http.post(route, body)).status == 200
        else:
            answer = await http.answer(route, body, [70])
            assert answer.headers["x-lockstep-ignored"] == "nonsense"


def test_counting_takes_the_fields_of_an_answer() -> None:
    assert MessagesFields.model_fields.keys() > CountTokensFields.model_fields.keys()
