"""The sandbox in which chat templates run: transformers', from jinja2 alone.

Importing transformers for it would be most of a start. Templates are written for what its sandbox gives them, so every
name and every refusal here is one of there.

Source: transformers 5.23, `_cached_compile_jinja_template` and `render_jinja_template` in utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

# The names under which templates read a message's reasoning, the usual one first.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def render(source: str, /, *, messages: Any, tools: Any, documents: Any = None, **variables: Any) -> str:
    """Render a template.

    Args:
        messages: Objects of plain JSON values, and so are `tools` and `documents`, which may be None.
        variables: What else the template sees.

    Raises:
        Exception: whatever the template raises, or what is not an object where one must be.
    """
    template = compile_template(source)
    for name, values in (("tools", tools), ("documents", documents), ("messages", messages)):
        if values is not None and not all(isinstance(value, dict) for value in values):
            raise TypeError(f"{name} must be objects")
    messages = [_with_reasoning(message) for message in messages]
    return template.render(messages=messages, tools=tools, documents=documents, **variables)


@lru_cache
def compile_template(source: str) -> Template:
    """Compile a template; the last few are kept. Raises `TemplateSyntaxError` and what the compiler raises."""
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - as templates may name it
    return datetime.now().strftime(format)  # noqa: DTZ005 - the server's time zone is meant


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As `json.dumps`: jinja2's own filter escapes what means something in HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant wrote: its body is rendered as a block of its own."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace` without attributes that begin with an underscore."""

    # The name `self` stays free for an attribute, as in jinja2's.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store {name!r} in a namespace")
