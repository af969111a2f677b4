"""Streaming parsers that split a reply into text, reasoning and tool calls, one for each family."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.replies.deepseek_v3 import CALLS_BEGIN, DeepseekV3Parser
from services.tokenizer.replies.glm4 import KEY_BEGIN, Glm4Parser
from services.tokenizer.replies.harmony import CHANNEL, HarmonyParser
from services.tokenizer.replies.hermes import HermesParser
from services.tokenizer.replies.llama3_json import Llama3JsonParser
from services.tokenizer.replies.openings import Opening
from services.tokenizer.replies.parser import ReplyParser, ReplySetting
from services.tokenizer.replies.parts import ReasoningPart, ReplyPart, TextPart, ToolCallPart
from services.tokenizer.replies.plain import PlainParser

__all__ = [
    "REPLY_PARSERS",
    "ReasoningPart",
    "ReplyParser",
    "ReplyPart",
    "TextPart",
    "ToolCallPart",
    "choose_reply_parser",
    "make_reply_parser",
]

REPLY_PARSERS: dict[str, type[ReplyParser]] = {
    "none": PlainParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "deepseek_v3": DeepseekV3Parser,
    "harmony": HarmonyParser,
    "glm4": Glm4Parser,
}

# Strings that only the template of one family contains; the first that is found decides.
_TEMPLATE_MARKS = (
    (CHANNEL, "harmony"),
    (CALLS_BEGIN, "deepseek_v3"),
    (KEY_BEGIN, "glm4"),
    # Qwen3-Coder's calls, for which there is no parser here.
    ("<function=", "none"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<think>", "hermes"),
)

# For templates that contain none of these.
_ARCHITECTURES = {
    "GptOssForCausalLM": "harmony",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4",
    "Qwen3ForCausalLM": "hermes",
    "Qwen3MoeForCausalLM": "hermes",
}


def choose_reply_parser(architecture: str, template_source: str | None) -> str:
    """The parser for a model, by its chat template or else its architecture."""
    if template_source is None:
        return "none"
    for mark, name in _TEMPLATE_MARKS:
        if mark in template_source:
            return name
    return _ARCHITECTURES.get(architecture, "none")


def make_reply_parser(
    name: str,
    *,
    tools: Sequence[Tool] = (),
    opening: Opening = Opening.EITHER,
    special_tokens: frozenset[str] = frozenset(),
    has_form: bool = False,
) -> ReplyParser:
    """Make a parser for one reply; `name` is one of `REPLY_PARSERS`, the rest as in `ReplySetting`."""
    return REPLY_PARSERS[name](ReplySetting(tuple(tools), opening, special_tokens, has_form))
