"""Prompts of a body: a text, a list of token ids, or a list of either."""

from __future__ import annotations

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.fields import Several

_ID_LIMIT = 2**32

PromptPart = str | Several[int]
Prompts = Several[PromptPart]


def read_prompts(value: object, *, most: int, what: str = "prompts") -> object:
    """One prompt or several, as a list. By hand, since a prompt may be a long list of ids.

    Raises:
        ValueError: it is none of these, or they are more than `most`.
    """
    if isinstance(value, list):
        value = _with_whole_ids([_with_whole_ids(each) if isinstance(each, list) else each for each in value])
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > most and not isinstance(value[0], int):
        raise ValueError(f"must have at most {most} {what}")
    if isinstance(value, list) and all(isinstance(item, str) or _is_ids(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of either")


def prompt_message(prompt: PromptPart) -> tokenizer_pb2.Prompt:
    """A prompt as the service has it."""
    if isinstance(prompt, str):
        return tokenizer_pb2.Prompt(text=prompt)
    return tokenizer_pb2.Prompt(tokens={"token_ids": prompt})


def _with_whole_ids(values: list[object]) -> list[object]:
    """Numbers such as `5.0` as the integers that they are."""
    if any(type(each) is float for each in values):
        return [int(each) if isinstance(each, float) and each.is_integer() else each for each in values]
    return values


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < _ID_LIMIT for item in value)
    )
