"""The length of a form's shortest text, and the refusal of forms whose texts fit no context."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.grammar.shortest_text import MAX_BYTES, shortest_json, shortest_match, shortest_text
from services.tokenizer.json.json_values import JsonValue
from shared.network.statuses import status_from_rpc_error
from tests.support.models.tiny_tokenizer import TOOLS_CHATML, write_tiny_tokenizer
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

BILLION = 10**9
Form = tokenizer_pb2.StructuredOutput
Request = tokenizer_pb2.GenerateRequest


def array(least: int, items: Any = True) -> dict[str, Any]:
    return {"type": "array", "minItems": least, "items": items}


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("a{1000000000}", BILLION),
        ("^(a{1000}){1000,}$", 10**6),
        ("a{5}|b", 1),
        ("a|", 0),
        ("(?:ab)+c?", 2),
        ("(?P<name>a{3})(?<other>bc)", 5),
        ("(?i)(a|bc){2,}?x*", 2),
        ("a{2}{3}", 6),
        ("[^]a]{3}[[:alpha:]]{4}[|(]", 8),
        (r"\x41\u0041\p{L}\.\d\\|\bzzzzzzzzz\b", 6),
        ("(?x) a b c", 0),
        ("(", 0),
        ("a)", 0),
        ("(" * 10_000, 0),
        ("(a{9999999999999})" * 1_000, 1000 * 9999999999999),
        (f"a{{{'9' * 5000}}}", MAX_BYTES),
        (f"a{{{'0' * 5000}7}}", 7),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_regular_expression_has_a_shortest_match(pattern: str, length: int) -> None:
    assert shortest_match(pattern) == length


@pytest.mark.parametrize("unit", ["[", "[[:a", "[a\\", "(?<", "(?a", r"\x{", r"\u{", r"\p{", "{1", "(a{2}"])
@pytest.mark.parametrize("end", ["", "\\", "["])
def test_a_hostile_regular_expression_is_read_once(unit: str, end: str) -> None:
    # If it were read again from each character, it would take an hour.
    assert shortest_match((unit * 100_000)[:100_000] + end) >= 0


@pytest.mark.parametrize(
    ("schema", "size"),
    [
        (True, 1),
        ({}, 1),
        ({"minLength": BILLION}, 1),
        ({"type": "string", "minLength": BILLION}, BILLION + 2),
        ({"type": "string", "minLength": 1e9}, BILLION + 2),
        ({"type": ["string", "null"], "minLength": BILLION}, 4),
        ({"type": "string", "pattern": "a{1000000000}"}, BILLION + 2),
        (array(BILLION), 2 * BILLION + 1),
        (array(10, array(10)), 221),
        (array(10**30), MAX_BYTES),
        ({"type": "array", "prefixItems": [{"const": "abc"}], "minItems": 3}, 11),
        ({"anyOf": [{"type": "null"}, array(BILLION)]}, 4),
        ({"oneOf": [array(5), array(6)]}, 11),
        ({"allOf": [array(3), array(7)]}, 15),
        ({"enum": ["abc", "d"]}, 3),
        ({"const": {"a": [100, "é"]}}, 14),
        ({"type": "object", "required": ["a", "b"], "properties": {"a": {"type": "null"}}}, 16),
        ({"$defs": {"x/y": array(9)}, "$ref": "#/$defs/x~1y"}, 19),
        ({"$ref": "#/nowhere"}, 1),
        ({"$ref": "https://example.com"}, 1),
        ({"$ref": "#"}, 1),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, 7),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_schema_has_a_shortest_text(schema: JsonValue, size: int) -> None:
    assert shortest_json(schema) == size


def test_nested_references_are_followed_quickly() -> None:
    links = [array(10, {"$ref": f"#/$defs/d{number + 1}"}) for number in range(3000)]
    definitions: dict[str, Any] = {f"d{number}": link for number, link in enumerate(links)}
    assert shortest_json({"$defs": definitions, "$ref": "#/$defs/d0"}) > BILLION


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("aé\\", max_size=4),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.sampled_from("ab"), values, max_size=2),
    max_leaves=6,
)
_SCHEMAS = st.recursive(
    st.one_of(
        st.just({}),
        st.builds(lambda value: {"const": value}, _VALUES),
        st.builds(lambda least: {"type": "string", "minLength": least}, st.integers(0, 4)),
        st.builds(lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(["^a{2}", "é|aa", "^$"])),
        st.builds(lambda kind: {"type": kind}, st.sampled_from(["null", "boolean", "object", ["string", "array"]])),
    ),
    lambda schemas: st.one_of(
        st.builds(array, st.integers(0, 3), schemas),
        st.builds(lambda first: {"type": "array", "minItems": 2, "prefixItems": [first]}, schemas),
        st.builds(lambda name, value: {"type": "object", "required": ["a"], "properties": {name: value}},
                  st.sampled_from("ab"), schemas),
        st.builds(lambda word, parts: {word: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]),
                  st.lists(schemas, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)  # fmt: skip


@given(schema=_SCHEMAS, value=_VALUES)
def test_no_valid_text_is_shorter(schema: dict[str, Any], value: Any) -> None:
    if jsonschema.Draft202012Validator(schema).is_valid(value):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert shortest_json(schema) <= len(text.encode())


@given(
    pattern=st.from_regex(r"((a|b|[ab]|\(a\|bb\)|\(b\))([*+?]|\{[0-3]\}|\{1,2\})?){1,4}", fullmatch=True),
    data=st.data(),
)
def test_no_match_is_shorter(pattern: str, data: st.DataObject) -> None:
    match = data.draw(st.from_regex(pattern, fullmatch=True))
    assert re.fullmatch(pattern, match)
    assert shortest_match(pattern) <= len(match)


@pytest.mark.parametrize(
    ("kind", "text", "size"),
    [
        ("json_schema", json.dumps(array(3)), 7),
        ("json_schema", "true", 1),
        ("regex", "a{7}", 7),
        ("choices", '["abc", "é"]', 2),
        ("grammar", 'start: "abc"', 0),
        ("json_object", "", 0),
    ],
)
def test_every_form_has_a_shortest_text(kind: str, text: str, size: int) -> None:
    assert shortest_text(kind, text) == size


async def refusal(service: Service, request: Request) -> str:
    """The message with which a request is refused as too complex."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(request).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert any(b"GRAMMAR_TOO_COMPLEX" in detail.value for detail in status_from_rpc_error(caught.value).details)
    return str(caught.value.details())


async def test_only_forms_that_fit_no_context_are_refused(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    write_tiny_tokenizer(model_dir, chat_template=TOOLS_CHATML + "{# <tool_call> #}")
    schemas = [array(BILLION), {"type": "string", "minLength": BILLION}, array(1000, array(1000))]
    forms = [Form(json_schema=json.dumps(schema)) for schema in schemas]
    forms += [Form(json_schema='{"type": "string", "pattern": "a{1000000000}"}')]
    tool = tokenizer_pb2.Tool(name="look_up", parameters=json.dumps({"properties": {"a": array(BILLION)},
                                                                     "required": ["a"], "type": "object"}))  # fmt: skip
    chat = tokenizer_pb2.Chat(
        messages=[tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="Hello")],
        tools=[tool],
        tool_mode=tokenizer_pb2.TOOL_MODE_REQUIRED,
    )
    async with run_tokenizer_service(model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        for form in forms:
            message = await refusal(service, Request(text="The fox", structured_output=form))
            assert "the model's context holds at most" in message
        assert "chat.tools: look_up: its shortest text" in await refusal(service, Request(chat=chat))
        fitting = Form(json_schema=json.dumps(array(20, {"type": "null"})))
        call, _ = await service.begin(Request(text="The fox", structured_output=fitting))
        call.cancel()
