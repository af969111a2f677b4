"""Runs a chat template, in the immutable sandbox that `transformers` sets up, with its filters and globals."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.json.json_values import JsonObject

_PARAMETERS = ("messages", "tools")


def render_template(source: str, special_tokens: dict[str, str], fields: JsonObject) -> str:
    """Render a template with the assistant's turn opened; raises whatever it raises, and takes as long as it takes.

    Args:
        source: The template.
        special_tokens: The text of each that it may use by name, such as `bos_token`.
        fields: `messages`, `tools` (None for none) and more variables, none of them named as a special token.
    """
    variables: dict[str, Any] = {name: value for name, value in fields.items() if name not in _PARAMETERS}
    # Annotated as `str`, it returns the texts of all conversations and what it tracked in them.
    rendered: Any = render_jinja_template(
        conversations=[fields["messages"]],
        tools=fields["tools"],
        chat_template=source,
        add_generation_prompt=True,
        **special_tokens,
        **variables,
    )
    return str(rendered[0][0])
