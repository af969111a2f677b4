from __future__ import annotations

import pytest

from services.tokenizer.json_values import MAX_DEPTH, read_json_object


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
        nested(MAX_DEPTH + 1),
        nested(100_000),
        '{"a": ' + "[" * 100_000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_json_object(text)
