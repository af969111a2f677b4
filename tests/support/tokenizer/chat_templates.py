"""Chat templates that are rendered in the test's own process, without limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.template_features import find_features, sample_tools
from services.tokenizer.chat.template_rendering import explain_failure, read_variables, render_template
from services.tokenizer.chat.template_trial import refusal
from services.tokenizer.json.json_values import JsonObject

_PLAIN = TemplateFeatures(takes_tools=True)


class LocalRenderer:
    """Renders at once."""

    def __init__(self, special_tokens: Mapping[str, str], sources: Mapping[str, bool] | None = None) -> None:
        """`sources` says which templates are for conversations with tools only."""
        self._special_tokens = dict(special_tokens)
        self._sources = sources or {}
        self.num_ended: dict[str, int] = {"cpu": 0}

    def try_template(self, source: str) -> TemplateFeatures:
        """See `Renderer`."""
        tools = sample_tools() if self._sources.get(source) else None
        try:
            features = find_features(lambda fields: render_template(source, self._special_tokens, fields), tools)
            return replace(features, variables=read_variables(source))
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            raise refusal(f"{type(error).__name__}: {error}") from None

    def render(self, source: str, fields: JsonObject, *, opens_turn: bool) -> str:
        """See `Renderer`."""
        try:
            return render_template(source, self._special_tokens, fields, opens_turn=opens_turn)
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            raise explain_failure(error, source) from None

    @property
    def max_render_s(self) -> float:
        """No limit."""
        return math.inf

    def warm_up(self, num_renders: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_local_renderer(
    sources: Mapping[str, bool],
    special_tokens: Mapping[str, str],
    /,
    *,
    cpu_s: float,
) -> LocalRenderer:
    """A `RendererMaker`."""
    return LocalRenderer(special_tokens, sources)


def local_template(
    source: str,
    special_tokens: Mapping[str, str],
    *,
    tools_source: str | None = None,
    features: TemplateFeatures = _PLAIN,
) -> ChatTemplate:
    """A template, with the names and texts of its special tokens."""
    return ChatTemplate(source, LocalRenderer(special_tokens), tools_source=tools_source, features=features)
