"""Bodies of requests that are malformed, by name: their JSON, or the values of their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

SECRET = "SECRET-of-the-client"
"""Is in the bodies, and must be in no log."""

_MESSAGES = [{"role": "user", "content": SECRET}]
_CHAT = json.dumps({"messages": _MESSAGES})

# Texts that are no JSON object.
_NO_JSON: dict[str, bytes] = {
    "nothing": b"",
    "white space": b" \n\t ",
    "a zero byte": b"\0",
    "UTF-16": _CHAT.encode("utf-16"),
    "UTF-32": _CHAT.encode("utf-32"),
    "Latin-1": '{"messages": [{"role": "user", "content": "é"}]}'.encode("latin-1"),
    "half a character": b'{"messages": [{"role": "user", "content": "\xe2\x82"}]}',
    "an overlong character": b'{"messages": [{"role": "user", "content": "\xc0\xaf"}]}',
    "an encoded surrogate": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "an escaped surrogate": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "surrogates in the wrong order": rb'{"messages": [{"role": "user", "content": "\udc00\ud800"}]}',
    "a surrogate in a name": rb'{"messages": [], "\udfff": 1}',
    "half an escape": rb'{"messages": [{"role": "user", "content": "\u12"}]}',
    "an unknown escape": rb'{"messages": [{"role": "user", "content": "\x"}]}',
    "a control character": b'{"messages": [{"role": "user", "content": "\x01"}]}',
    "a zero in a text": b'{"messages": [{"role": "user", "content": "\0"}]}',
    "a line in a text": b'{"messages": [{"role": "user", "content": "a\nb"}]}',
    "an open object": _CHAT[:-1].encode(),
    "an open list": b'{"messages": [',
    "an open text": f'{{"messages": "{SECRET}'.encode(),
    "a word": SECRET.encode(),
    "a comma too many": f'{{"messages": "{SECRET}",}}'.encode(),
    "a comma too few": b'{"messages": [] "n": 1}',
    "two values": f"{_CHAT}{_CHAT}".encode(),
    "something after it": f"{_CHAT} {SECRET}".encode(),
    "a comment": f"/* {SECRET} */ {_CHAT}".encode(),
    "single quotes": b"{'messages': []}",
    "a name without quotes": b"{messages: []}",
    "a form": f"messages={SECRET}".encode(),
    "XML": f"<messages>{SECRET}</messages>".encode(),
    "a list": f"[{_CHAT}]".encode(),
    "a text": json.dumps(SECRET).encode(),
    "a number": b"1",
    "a boolean": b"true",
    "null": b"null",
    "two equal names": b'{"messages": [], "messages": []}',
    "two equal names inside": b'{"messages": [{"role": "user", "role": "user", "content": "x"}]}',
    "two equal names that are written differently": rb'{"messages": [], "m\u0065ssages": []}',
    "lists of lists": b"[" * 100_000,
    "objects of objects": b'{"a":' * 100_000,
    "a deep value": b'{"messages": ' + b"[" * 64 + b"]" * 64 + b"}",
    "a very deep value": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
}
_NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "01",
    "1.",
    ".5",
    "+1",
    "1e",
    "0x10",
    "1_000",
    "1e999",
    "-1e999",
    "9" * 5000,
]
_NO_JSON |= {
    f"the number {number[:12]}": f'{{"messages": {json.dumps(_MESSAGES)}, "temperature": {number}}}'.encode()
    for number in _NUMBERS
}

_VALUES: dict[str, Any] = {
    "a boolean": True,
    "a text": SECRET,
    "a negative number": -1,
    "a fraction": 1.5,
    "a large number": 2**70,
    "the largest double": 1.7e308,
    "a list": [SECRET],
    "a list of lists": [[[]]],
    "an object": {SECRET: SECRET},
}
# The fields, and those of the values above that they can have.
_FIELDS: dict[str, tuple[str, ...]] = {
    "messages": (),
    "model": (),
    "stream": ("a boolean",),
    "stream_options": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "n": (),
    "seed": ("a negative number", "a large number"),
    "stop": ("a text", "a list"),
    "temperature": ("a fraction",),
    "top_p": (),
    "frequency_penalty": ("a negative number", "a fraction"),
    "presence_penalty": ("a negative number", "a fraction"),
    "logit_bias": (),
    "logprobs": ("a boolean",),
    "top_logprobs": (),
    "response_format": (),
    "tools": (),
    "tool_choice": (),
    "parallel_tool_calls": ("a boolean",),
    "reasoning_effort": (),
    "top_k": ("a negative number",),
    "min_p": (),
    "structured_outputs": (),
    "chat_template_kwargs": ("an object",),
    "timeout_s": ("a fraction", "the largest double"),
}


def malformed_chats() -> dict[str, bytes]:
    """Bodies for `POST /v1/chat/completions`, each of which is wrong, by what is wrong."""
    bodies = dict(_NO_JSON)
    for field, possible in _FIELDS.items():
        for name, value in _VALUES.items():
            if name not in possible:
                body = {"messages": _MESSAGES, field: value}
                bodies[f"{name} as {field}"] = json.dumps(body).encode()
    return bodies


def huge_chats() -> dict[str, Callable[[], bytes]]:
    """What makes wrong bodies of almost 4 MiB, which must cost little more than their size, by what is wrong."""
    size = 4 * 1024 * 1024 - 200
    beginning = b'{"messages": ['
    text = f'{{"messages": [{{"role": "user", "content": "{SECRET}"}}]'.encode()

    def many(item: bytes, start: bytes, end: bytes) -> Callable[[], bytes]:
        return lambda: start + b",".join([item] * ((size - len(start)) // (len(item) + 1))) + end

    return {
        "numbers for messages": many(b"1", beginning, b"]}"),
        "lists for messages": many(b"[]", beginning, b"]}"),
        "objects for messages": many(b"{}", beginning, b"]}"),
        "numbers for parts": many(b"1", b'{"messages": [{"role": "user", "content": [', b"]}]}"),
        "numbers for tools": many(b"1", text + b', "tools": [', b"]}"),
        "negative token ids": many(b"-1", text + b', "stop_token_ids": [', b"]}"),
        "texts for bad words": many(b'""', text + b', "bad_words": [', b"]}"),
        "equal names": many(b'"a":1', text + b', "metadata": {', b"}}"),
        "many biases": lambda: text + b', "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}",
        "a long number": lambda: text + b', "seed": ' + b"1" * (size - 100) + b"}",
        "a long text": lambda: b'{"messages": [{"role": "user", "content": "' + b"x" * (size - 100) + b'"}]}',
        "a long name": lambda: b'{"' + b"x" * (size - 100) + b'": 1}',
        "white space": lambda: b" " * size,
        "zeros": lambda: b"\0" * size,
    }


def shows_secret(error: Mapping[str, Any]) -> bool:
    """Whether an error of the HTTP API shows the client's text, unless it names a model that is not served."""
    return SECRET in error["message"] and error["code"] != "model_not_found"
