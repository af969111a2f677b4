"""Runs a chat template in the immutable sandbox of `transformers`."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.json.json_values import JsonObject

_PARAMETERS = ("messages", "tools")


def render_template(source: str, special_tokens: dict[str, str], fields: JsonObject, *, opens_turn: bool = True) -> str:
    """Render a template, with the assistant's turn opened at the end if `opens_turn`.

    Its exceptions pass through, its time is unlimited. `fields` are `messages`, `tools` (None for none) and variables,
    none named like a special token.
    """
    variables: dict[str, Any] = {name: value for name, value in fields.items() if name not in _PARAMETERS}
    # Despite its annotation `str`, it returns the texts of all conversations and the spans that it tracked in them.
    rendered: Any = render_jinja_template(
        conversations=[fields["messages"]],
        tools=fields["tools"],
        chat_template=source,
        add_generation_prompt=opens_turn,
        **special_tokens,
        **variables,
    )
    return str(rendered[0][0])
