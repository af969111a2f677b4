"""Renders conversations with the model's own chat template.

The template comes from the model directory and nowhere else, and runs in the immutable sandbox that
`transformers` sets up for templates, with the same filters and globals. No torch is imported on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from shared.errors import InvalidRequestError, Violation
from shared.model_dir import CHAT_TEMPLATE, ModelDirectoryError, read_json

logger = logging.getLogger(__name__)

_TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` as templates know it."""

    role: str
    content: str


class ChatTemplate:
    """A template that is known to render a plain message, so a conversation that fails is itself to blame."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        """Take a template and try it.

        Args:
            source: The template.
            special_tokens: The text of each that it may use by name, such as `bos_token`.

        Raises:
            ModelDirectoryError: it does not render a plain message.
        """
        self._source = source
        self._special_tokens = special_tokens
        try:
            self._render([Message("user", "Hello")])
        except Exception as error:
            raise ModelDirectoryError(f"the chat template does not render a plain message: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation with the assistant's turn opened. Runs the template: not for an event loop.

        Raises:
            InvalidRequestError: the template refuses the messages, or they make it fail.
        """
        try:
            return self._render(messages)
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            refused = type(error) is TemplateError
            # The error's text may hold a message's content, which is never logged.
            logger.info("a chat template failed", extra={"refused": refused, "error_type": type(error).__name__})
            description = "the model's chat template refuses them" if refused else "they make the chat template fail"
            raise InvalidRequestError.from_violations(
                [Violation("chat.messages", "TEMPLATE_FAILED", description)]
            ) from None

    def _render(self, messages: Sequence[Message]) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        # Annotated as `str`, it returns the texts of all conversations and what it tracked in them.
        rendered: Any = render_jinja_template(
            conversations=[conversation],
            chat_template=self._source,
            add_generation_prompt=True,
            **self._special_tokens,
        )
        return str(rendered[0][0])


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """The model's template; None when the directory has none.

    Raises:
        ModelDirectoryError: a file is malformed, or the template does not render a plain message.
    """
    config = read_json(model_dir, _TOKENIZER_CONFIG) if (model_dir / _TOKENIZER_CONFIG).exists() else {}
    source = _template_source(model_dir, config)
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / CHAT_TEMPLATE
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelDirectoryError(f"{path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelDirectoryError(f"{model_dir / _TOKENIZER_CONFIG}: chat_template is no text")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """The special tokens that the configuration names: each a text, or an object that holds it."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
