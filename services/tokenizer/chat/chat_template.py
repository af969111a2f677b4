"""Renders conversations with the chat template, which only comes from the model directory. Must not import torch."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from services.tokenizer.chat.conversation import Conversation, Tool
from services.tokenizer.chat.deepseek_v32_template import DEEPSEEK_V32_TEMPLATE
from services.tokenizer.chat.generic_tools_template import TOOL_ROLES, with_generic_tools
from services.tokenizer.chat.message_forms import Guard, TemplateFeatures, message_fields
from services.tokenizer.chat.template_renderer import Renderer, RendererMaker, TemplateRenderer
from services.tokenizer.chat.template_rendering import RenderError
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from shared.errors import InvalidRequestError, Violation
from shared.model_files.model_dir import ModelDirectoryError

logger = logging.getLogger(__name__)

# For models that are published without one.
_TEMPLATES = {"DeepseekV32ForCausalLM": DEEPSEEK_V32_TEMPLATE}

_PLAIN = TemplateFeatures(takes_tools=True)


class ChatTemplate:
    """A template known to render a plain message, so a failure is the conversation's fault."""

    def __init__(
        self,
        source: str,
        renderer: Renderer,
        *,
        tools_source: str | None = None,
        features: TemplateFeatures = _PLAIN,
    ) -> None:
        """`renderer` renders both sources; `tools_source` None means `source`."""
        self._source = source
        self._tools_source = source if tools_source is None else tools_source
        self._renderer = renderer
        self._features = features

    @property
    def text(self) -> str:
        """The source, including a separate template for tools."""
        return self._source if self._tools_source is self._source else f"{self._source}\n{self._tools_source}"

    @property
    def digest(self) -> str:
        """SHA-256 of `text`, in hex. Replicas of one model may differ in it: they only write prompts in other ways."""
        return hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()

    @property
    def num_ended_renders(self) -> Mapping[str, int]:
        """`Renderer.num_ended`."""
        return self._renderer.num_ended

    @property
    def takes_tools(self) -> bool:
        """Whether the prompt lists tools."""
        return self._features.takes_tools

    @property
    def shows_calls(self) -> bool:
        """Whether the prompt shows calls, in some form."""
        return not self._features.loses_calls

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that it reads."""
        return frozenset(self._features.variables)

    def fields(self, conversation: Conversation, guard: Guard = lambda value: value) -> JsonObject:
        """The variables for `apply_chat_template`; `guard` is applied to everything the client wrote.

        Raises:
            InvalidRequestError: the template would leave something out: tools, calls, the content beside them, or a
                system message alone.
        """
        if conversation.offered_tools and not self._features.takes_tools:
            raise InvalidRequestError.from_violations(
                [Violation("chat.tools", "OUT_OF_RANGE", "must be empty: the model's chat template takes no tools")]
            )
        if self._features.system_needs_user and all(each.role == "system" for each in conversation.messages):
            text = "must have a user's message: the model's chat template leaves a system message alone out"
            raise InvalidRequestError.from_violations([Violation("chat.messages", "OUT_OF_RANGE", text)])
        if violations := list(_lost(conversation, self._features)):
            raise InvalidRequestError.from_violations(violations)
        tools: list[JsonValue] = [_tool_fields(tool, guard) for tool in conversation.offered_tools]
        return {
            **{name: guard(value) for name, value in conversation.variables.items()},
            "messages": message_fields(conversation.messages, self._features, guard),
            "tools": tools or None,
        }

    @property
    def max_render_s(self) -> float:
        """The longest that `render` can take, in seconds."""
        return self._renderer.max_render_s

    def warm_up(self, num_renders: int) -> None:
        """Prepare for as many renders at once, without waiting; only from a thread that lasts."""
        self._renderer.warm_up(num_renders)

    def close(self) -> None:
        """Render nothing any more."""
        self._renderer.close()

    def render(self, fields: JsonObject, *, opens_turn: bool = True) -> str:
        """Render `fields`, with the assistant's turn opened at the end if `opens_turn`. Too slow for the event loop.

        Raises:
            InvalidRequestError: the template rejects the conversation, fails on it, or exceeds a limit.
            RequestTooLargeError: it writes too much.
            QueueFullError: the machine is too busy.
        """
        source = self._source if fields["tools"] is None else self._tools_source
        try:
            return self._renderer.render(source, fields, opens_turn=opens_turn)
        except RenderError as error:
            # What the template raised may contain a message's content, which is never logged.
            logger.info("rendering a chat failed", extra={"error_type": error.error_type})
            raise InvalidRequestError.from_violations(
                [Violation("chat.messages", "TEMPLATE_FAILED", str(error))]
            ) from None


def load_chat_template(
    tokenizer: ModelTokenizer,
    *,
    timeout_s: float,
    architecture: str = "",
    make_renderer: RendererMaker = TemplateRenderer,
    lacks_tools: Callable[[ChatTemplate], bool] = lambda _: False,
) -> ChatTemplate | None:
    """The tokenizer's template after a trial, or else the one for its architecture.

    None if there is none that takes conversations without tools. One that `lacks_tools` gets generic ones, if it takes
    a message that lists them.

    Raises:
        ModelDirectoryError: the template fails its trial.
    """
    sources: dict[str, str] = {
        name: tokenizer.templates[name] for name in ("default", "tool_use") if name in tokenizer.templates
    }
    if "default" not in sources:
        if architecture not in _TEMPLATES:
            return None
        logger.info("the directory has no chat template, a built-in one is used", extra={"architecture": architecture})
        sources = {"default": _TEMPLATES[architecture]}

    def make(sources: Mapping[str, str]) -> ChatTemplate:
        needs_tools = {each: name == "tool_use" for name, each in sources.items()}
        return _tried(sources, make_renderer(needs_tools, tokenizer.special_tokens, cpu_s=timeout_s))

    template = make(sources)
    if not lacks_tools(template):
        return template
    generic = _with_generic_tools(sources["default"], make)
    if generic is None:
        logger.warning("the chat template cannot show tools in any message, and requests with tools are refused")
        return template
    template.close()
    return generic


def _tried(sources: Mapping[str, str], renderer: Renderer) -> ChatTemplate:
    """A template after the trial of its sources, `default` and perhaps `tool_use`; raises as `load_chat_template`."""
    try:
        tried = [renderer.try_template(each) for each in sources.values()]
    except ModelDirectoryError:
        renderer.close()
        raise
    features = replace(tried[-1], variables=tuple(sorted({name for each in tried for name in each.variables})))
    return ChatTemplate(sources["default"], renderer, tools_source=sources.get("tool_use"), features=features)


def _with_generic_tools(source: str, make: Callable[[Mapping[str, str]], ChatTemplate]) -> ChatTemplate | None:
    """The template with generic tools, where it shows them and their calls; else None."""
    for role in TOOL_ROLES:
        with contextlib.suppress(ModelDirectoryError):
            template = make({"default": with_generic_tools(source, role)})
            if template.takes_tools and template.shows_calls:
                logger.info("the chat template takes no tools, they are in a message", extra={"role": role})
                return template
            template.close()
    return None


def _lost(conversation: Conversation, features: TemplateFeatures) -> Iterator[Violation]:
    """The first message of which something would be left out."""
    for index, message in enumerate(conversation.messages):
        field = f"chat.messages[{index}]"
        if message.tool_calls and features.loses_calls:
            text = "must have no calls: the model's chat template shows none; leave them and their results out"
            yield Violation(f"{field}.tool_calls", "OUT_OF_RANGE", text)
            return
        if message.tool_calls and message.content and features.loses_content:
            text = "must have no text beside calls: the model's chat template leaves it out; send it before them"
            yield Violation(f"{field}.content", "OUT_OF_RANGE", text)
            return


def _tool_fields(tool: Tool, guard: Guard) -> JsonObject:
    function: JsonObject = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": guard(function)}
