"""Every name that the types of OpenAI's and Anthropic's libraries know is honoured, without effect, or refused by name.

A newer library may know one that is in no list: its pins are raised together with the table.
"""

from __future__ import annotations

import json
import subprocess
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from services.tokenizer.http.anthropic.request import CountTokensFields, MessagesFields
from services.tokenizer.http.fields.field_rules import DONE_ANYWAY, REFUSED, WITHOUT_EFFECT
from services.tokenizer.http.fields.fields import Fields
from services.tokenizer.http.openai.chat_request import ChatFields
from services.tokenizer.http.openai.completion_request import CompletionFields
from services.tokenizer.http.openai_responses.request import ResponseFields
from tests.support.system.environments import TESTS, environment_of

pytestmark = pytest.mark.clients

OPENAI, ANTHROPIC = "clients/openai_python", "clients/anthropic_python"
TYPES: list[tuple[str, str, type[Fields]]] = [
    (OPENAI, "openai.types.chat.completion_create_params:CompletionCreateParams", ChatFields),
    (OPENAI, "openai.types.completion_create_params:CompletionCreateParams", CompletionFields),
    (OPENAI, "openai.types.responses.response_create_params:ResponseCreateParams", ResponseFields),
    (ANTHROPIC, "anthropic.types.message_create_params:MessageCreateParams", MessagesFields),
    (ANTHROPIC, "anthropic.types.beta.message_create_params:MessageCreateParams", MessagesFields),
    (ANTHROPIC, "anthropic.types.message_count_tokens_params:MessageCountTokensParams", CountTokensFields),
    (ANTHROPIC, "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams", CountTokensFields),
]


# Names of types that are refused by their `type`.
OF_REFUSED_TYPES = {"tool_choice.server_label"}


def names_in(client: str, kind: str) -> list[str]:
    """The names of the library's type."""
    program = [str(environment_of(client) / "bin" / "python"), str(TESTS / "clients" / "param_names.py"), kind]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    names: dict[str, list[str]] = json.loads(done.stdout)
    return names[kind]


def models_in(annotation: Any) -> Iterator[type[Fields]]:
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


def is_decided(kind: type[Fields], name: str) -> bool:
    """Whether a route with these fields knows what to do with a name."""
    outer, _, inner = name.partition(".")
    if outer in DONE_ANYWAY or inner in DONE_ANYWAY or name in WITHOUT_EFFECT or name in REFUSED:
        return True
    fields = {each.alias or field: each for field, each in kind.model_fields.items()}
    if outer not in fields:
        # All that is inside goes the same way.
        return outer in WITHOUT_EFFECT or outer in REFUSED
    models = list(models_in(fields[outer].annotation))
    return not inner or not models or any(is_decided(model, inner) for model in models)


@pytest.mark.parametrize(("client", "kind", "fields"), TYPES, ids=[kind for _, kind, _ in TYPES])
def test_every_name_of_a_librarys_type_is_decided(client: str, kind: str, fields: type[Fields]) -> None:
    names = names_in(client, kind)
    assert {"model", "messages", "prompt", "input"} & set(names)
    assert [name for name in names if not is_decided(fields, name)] == [*OF_REFUSED_TYPES.intersection(names)]


@pytest.mark.parametrize("fields", {fields for _, _, fields in TYPES}, ids=lambda fields: fields.__name__)
def test_a_name_of_nobody_is_not_decided(fields: type[Fields]) -> None:
    assert not is_decided(fields, "made_up")
    if "stream_options" in fields.model_fields:
        assert not is_decided(fields, "stream_options.made_up")
