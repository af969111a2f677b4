from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.json.json_values import read_json
from services.tokenizer.replies.json_reading import read_value
from services.tokenizer.replies.json_repair import JsonRepair, repaired
from services.tokenizer.replies.reader import TextEndedError, TextReader, UnparsableError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, *, piece_size: int = 1) -> tuple[str, str]:
    """The text read as a value, and how reading ended: "read", "ended" or "wrong"."""
    reader = TextReader()
    course = read_value(reader)
    fed = 0
    while True:
        try:
            next(course)
        except StopIteration:
            return text[: reader.position], "read"
        except TextEndedError:
            return text[: reader.position], "ended"
        except UnparsableError:
            return text[: reader.position], "wrong"
        if fed >= len(text):
            reader.is_complete = True
        reader.add(text[fed : fed + piece_size])
        fed += piece_size


@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t "]), st.integers(1, 40))
def test_a_value_is_read_to_its_end_and_no_further(
    value: object, ascii_only: bool, indent: int | str | None, size: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert read(text + "}", piece_size=size) == (text, "read")


@given(VALUES, st.data())
def test_reading_a_truncated_value_ends_without_an_error(value: object, data: st.DataObject) -> None:
    text = json.dumps({"a": [value]})
    cut = data.draw(st.integers(0, len(text) - 1))
    taken, how = read(text[:cut])
    assert how == "ended"
    # What is not yet known to be valid: a number, a word, an escape.
    assert text.startswith(taken)
    assert '"' not in text[len(taken) : cut].replace('\\"', "")


@given(st.text('{}[]",:\\ue0123-+.Etruefalsn \n\x01a', max_size=20))
def test_what_python_reads_is_read_and_the_rest_can_be_repaired(text: str) -> None:
    taken, how = read(text)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (json.JSONDecodeError, RecursionError):
        if how == "read":
            assert is_strict(repaired(taken))
    else:
        # Python accepts the prefix "1" of "1e" or "1.".
        assert (taken, how) == (text[:end], "read") or text[end : end + 1] in set("+-.eE0123456789")
        assert how != "read" or is_strict(repaired(taken))


def is_strict(text: str) -> bool:
    """Whether a text is JSON that this service accepts."""
    read_json(text, max_depth=64)
    return True


HOSTILE = st.sampled_from(
    ['"', "\\", "\\u", "\\ud83d", "\\ude00", "\\q", "\n", "\x01", "é", "😀", "a", "</think>", "\\u00"]
)


@given(st.lists(HOSTILE, max_size=8).map("".join), st.data())
def test_a_string_is_repaired_however_it_is_cut(content: str, data: st.DataObject) -> None:
    text = f'{{"a": "{content}", "b": [NaN, -Infinity, 1e999, -1.50, 12345678901234567890]}}'
    taken, how = read(text)
    if how != "read":
        return
    whole = repaired(taken)
    value = read_json(whole, max_depth=64)
    assert isinstance(value, dict)
    repair, position, pieces = JsonRepair(), 0, []
    while position < len(taken):
        size = data.draw(st.integers(1, 9))
        pieces.append(repair.push(taken[position : position + size]))
        position += size
    assert "".join([*pieces, repair.finish()]) == whole


@pytest.mark.parametrize(
    ("written", "passed_on"),
    [
        ('"a\nb\x01"', '"a\\nb\\u0001"'),
        ('"\\ud83d"', '"\\ufffd"'),
        ('"\\ud83d\\ude00"', '"\\ud83d\\ude00"'),
        ('"\\ude00\\ud83d"', '"\\ufffd\\ufffd"'),
        ('"\\ud83dx"', '"\\ufffdx"'),
        ('"C:\\dir\\u12"', '"C:\\\\dir\\\\u12"'),
        ("[NaN, Infinity, -Infinity]", "[null, null, null]"),
        ("[1e999, -1e999, 1e308, 0.10, 12345678901234567890]", "[null, null, 1e308, 0.10, 12345678901234567890]"),
        ("9" * 400, "null"),
        ('{"a": [1, 2, ],\n "b": {"c": 1,},\n}', '{"a": [1, 2 ],\n "b": {"c": 1}\n}'),
        ('["a,]", 1]', '["a,]", 1]'),
        (f"[1,{' ' * 100}2,{' ' * 100}]", f"[1,{' ' * 64}2{' ' * 64}]"),
        ('{"NaN": "1e999"}', '{"NaN": "1e999"}'),
    ],
)
def test_what_json_cannot_say_is_replaced(written: str, passed_on: str) -> None:
    assert repaired(written) == passed_on
    assert is_strict(passed_on)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": 1,,}', '{"a": 1,'),
        ("{,}", "{"),
        ("[1,,]", "[1,"),
        ("[,]", "["),
        ('{"a" 1}', '{"a" '),
        ('{"a": tru, "b"}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ("[1 2]", "[1 "),
        ("{`a`: 1}", "{"),
        ("[" * 100, "[" * 65),
    ],
)
def test_invalid_text_is_not_consumed(text: str, taken: str) -> None:
    assert read(text) == read(text, piece_size=100) == (taken, "wrong")
