from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.json.json_values import MAX_DEPTH, most_values, read_json, read_json_object


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("text", ["{}", '{"a": [1, -2.5, true, null, "\\ud83d\\ude00"]}', nested(MAX_DEPTH)])
def test_an_object_is_read(text: str) -> None:
    assert isinstance(read_json_object(text), dict)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '{"a": NaN}',
        '{"a": -Infinity}',
        "{'a': 1}",
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": ' + "9" * 400 + "}",
        '{"a": 1e999}',
        nested(MAX_DEPTH + 1),
        nested(100_000),
        '{"a": ' + "[" * 100_000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_json_object(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [1, {"b": NaN}]}', "NaN is not a JSON value, at $.a[1].b"),
        ("-Infinity", "-Infinity is not a JSON value, at $"),
        ("[1e999]", "a number is beyond 1.8e308, at $[0]"),
        (f"[{2**1024 - 2**970}]", "a number is beyond 1.8e308, at $[0]"),
        ('{"a": ' + "9" * 400 + "}", "a number is beyond 1.8e308, at $.a"),
        ('{"a": ' + "9" * 5000 + "}", "a number of 5000 characters is beyond 1.8e308, at $.a"),
        ('["\\ud800"]', "a lone surrogate is not valid text, at $[0]"),
        ('{"\\udc00": 1}', "a lone surrogate is not valid text, in a name at $.?"),
        ("[" * 3 + "]" * 3, "nested too deep: more than 2 levels, at $[0][0]"),
        ("[" * 100_000, "nested too deep: more than 2 levels"),
        ('{"' + "a" * 100 + '": NaN}', "NaN is not a JSON value, at $." + "a" * 58 + "…"),
    ],
)
def test_an_error_is_reported_with_its_location(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        read_json(text, max_depth=2 if "[[[" in text else 8)
    assert str(caught.value) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a",[{\\\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a",[{\\'), inner),
)


def num_values(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@given(JSON)
def test_no_json_has_more_values_than_are_found_without_parsing_it(value: object) -> None:
    found = most_values(json.dumps(value), enough=0)
    assert num_values(value) <= found <= 2 * num_values(value)


@pytest.mark.parametrize("text", ['"' * 500_000, '"\\"' * 200_000, "\\" * 500_000, '"' + "\\" * 500_001])
def test_values_of_what_is_no_json_are_counted_in_linear_time(text: str) -> None:
    assert most_values(text, enough=0) >= 1
