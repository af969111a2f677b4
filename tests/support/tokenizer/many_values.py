"""Bodies that have many of anything that may be many, at any depth, for every reader of the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel

from services.tokenizer.http.anthropic.request import CountTokensFields, MessagesFields
from services.tokenizer.http.openai.chat_request import ChatFields
from services.tokenizer.http.openai.completion_request import CompletionFields
from services.tokenizer.http.openai.token_requests import DetokenizeFields, TokenizeFields
from services.tokenizer.http.openai_responses.request import ResponseFields

USER: dict[str, Any] = {"role": "user", "content": "a"}
KINDS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "read_chat_request": (ChatFields, {"messages": [USER]}),
    "read_completion_request": (CompletionFields, {"prompt": "a"}),
    "read_messages_request": (MessagesFields, {"messages": [USER], "max_tokens": 9}),
    "read_count_request": (CountTokensFields, {"messages": [USER]}),
    "read_response_request": (ResponseFields, {"input": [USER]}),
    "read_tokenize_request": (TokenizeFields, {"prompt": "a"}),
    "read_detokenize_request": (DetokenizeFields, {"tokens": [1]}),
}
TEXT, THOUGHT = {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "a", "signature": ""}
# What makes an object one that is read, and not refused at once; by the beginning of its type's name.
ITEMS: dict[str, list[dict[str, Any]]] = {
    "ChatMessage": [USER, {"role": "system", "content": "a"}, {"role": "assistant", "content": [THOUGHT]}],
    "MessagesTurn": [USER, {"role": "assistant", "content": [THOUGHT]}],
    "ContentPart": [TEXT, {"type": "tool_result", "tool_use_id": "1", "content": "a"}],
    "MessagesPart": [TEXT, {"type": "tool_addition", "tool": {"type": "x", "definition": {"name": "f"}}}],
    "ItemPart": [{"type": "input_text", "text": "a"}],
    "InputItem": [
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "f"}]},
    ],
    "ChatTool": [{"type": "function", "function": {"name": "f"}}],
    "MessagesTool": [{"name": "f", "input_schema": {}}],
    "ResponseTool": [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}],
}
# Values of any kind, where they are passed on, unknown, or of the wrong type.
VALUES: list[Any] = ["ab", 1, 1.5, [], {}, {"a": 1}, [[]], True]
_MANY = "@many@"
_MAX_DEPTH = 4


def bodies(reader: str) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """What a body may have many of, and what makes such a body of at most so many bytes."""
    kind, base = KINDS[reader]
    shapes = dict(_shapes(kind, base, 1))
    shapes["unknown"] = (base | {"unknown_name": _MANY}, VALUES)
    for name, (shape, items) in shapes.items():
        for item in items:
            yield f"{name} of {json.dumps(item)}", partial(_with_items, json.dumps(shape), json.dumps(item))
        yield f"{name} of names", partial(_with_names, json.dumps(shape))


def full_bodies(reader: str) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """Lists that a body may have as many objects in as it may have in all, and what makes one of so many items.

    An item is an object of the list's kind, or has one of another kind.
    """
    kind, base = KINDS[reader]
    for name, (shape, items) in _shapes(kind, base, 1):
        for item in items if items is not VALUES else ():
            text, inner = json.dumps(item), json.dumps(shape)
            yield f"{name} of {text}", partial(_with_many, inner, text)


def _with_many(body: str, item: str, num_items: int) -> bytes:
    return body.replace(f'"{_MANY}"', f"[{','.join([item] * num_items)}]").encode()


def _with_items(body: str, item: str, num_bytes: int) -> bytes:
    return _with_many(body, item, (num_bytes - len(body)) // (len(item) + 1))


def _with_names(body: str, num_bytes: int) -> bytes:
    pairs = (f'"{index:06}":1' for index in range((num_bytes - len(body)) // 11))
    return body.replace(f'"{_MANY}"', f"{{{','.join(pairs)}}}").encode()


def _shapes(kind: type[BaseModel], base: dict[str, Any], depth: int) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
    """An object of a kind for each of its fields that may have many values, also inside of others."""
    for name, field in kind.model_fields.items():
        key, annotation = field.alias or name, field.annotation
        inner = [each for each in _parts(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
        if any(
            each in (list, dict) or getattr(each, "__origin__", None) in (list, dict) for each in _parts(annotation)
        ):
            items = [item for each in inner for item in _items_of(each)]
            yield key, (base | {key: _MANY}, items or VALUES)
        for each in inner if depth < _MAX_DEPTH else ():
            holder = _items_of(each)[0]
            for path, (shape, items) in _shapes(each, holder, depth + 1):
                is_list = any(getattr(part, "__origin__", None) is list for part in _parts(annotation))
                yield f"{key}.{path}", (base | {key: [shape] if is_list else shape}, items)


def _items_of(kind: type[BaseModel]) -> list[dict[str, Any]]:
    return ITEMS.get(kind.__name__, [{}])


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from _parts(each)
