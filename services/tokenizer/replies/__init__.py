"""Streaming parsers that split a reply into text, reasoning and tool calls, one for each family."""

from __future__ import annotations

from services.tokenizer.chat.generic_tools_template import GENERIC_MARK
from services.tokenizer.replies.families import kimi_k2
from services.tokenizer.replies.families.deepseek_v3 import CALLS_BEGIN, DeepseekV3Parser
from services.tokenizer.replies.families.deepseek_v32 import DSML, DeepseekV32Parser
from services.tokenizer.replies.families.generic import GenericParser
from services.tokenizer.replies.families.glm4 import KEY_BEGIN, Glm4Parser
from services.tokenizer.replies.families.harmony import CHANNEL, HarmonyParser
from services.tokenizer.replies.families.hermes import HermesParser
from services.tokenizer.replies.families.kimi_k2 import KimiK2Parser
from services.tokenizer.replies.families.llama3_json import Llama3JsonParser
from services.tokenizer.replies.families.mistral import CALLS, MistralParser
from services.tokenizer.replies.families.plain import PlainParser
from services.tokenizer.replies.families.qwen3_coder import FUNCTION_BEGIN, Qwen3CoderParser
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import ReplyParser, ReplySetting
from services.tokenizer.replies.parts import ReasoningPart, ReplyPart, TextPart, ToolCallPart

__all__ = [
    "REPLY_PARSERS",
    "ReasoningPart",
    "ReplyParser",
    "ReplyPart",
    "ReplySetting",
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
    "deepseek_v32": DeepseekV32Parser,
    "harmony": HarmonyParser,
    "kimi_k2": KimiK2Parser,
    "glm4": Glm4Parser,
    "qwen3_coder": Qwen3CoderParser,
    "mistral": MistralParser,
    "generic": GenericParser,
}

# Strings that only the templates of one family contain together; the first that are all found decide.
_TEMPLATE_MARKS = (
    ((GENERIC_MARK,), "generic"),
    ((CHANNEL,), "harmony"),
    ((DSML,), "deepseek_v32"),
    ((CALLS_BEGIN,), "deepseek_v3"),
    # The first in its own templates, the other one in those without tools too.
    ((kimi_k2.CALLS_BEGIN,), "kimi_k2"),
    (("<|im_middle|>",), "kimi_k2"),
    ((KEY_BEGIN,), "glm4"),
    ((FUNCTION_BEGIN,), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    # Llama 3.2, and models made of Llama 3, have no tag.
    (("<|start_header_id|>", '"parameters": '), "llama3_json"),
    ((CALLS,), "mistral"),
    ((THINK_MARKUP["mistral"].begin,), "mistral"),
    (("<think>",), "hermes"),
)

# For templates that contain none of these.
_ARCHITECTURES = {
    "GptOssForCausalLM": "harmony",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "KimiK25ForConditionalGeneration": "kimi_k2",
    "Glm4MoeForCausalLM": "glm4",
    "Glm4MoeLiteForCausalLM": "glm4",
    "Glm4vMoeForConditionalGeneration": "glm4",
    "GlmMoeDsaForCausalLM": "glm4",
    "Qwen3ForCausalLM": "hermes",
    "Qwen3MoeForCausalLM": "hermes",
    "Qwen3VLForConditionalGeneration": "hermes",
    "Qwen3VLMoeForConditionalGeneration": "hermes",
}


def choose_reply_parser(architecture: str, template_source: str | None) -> str:
    """The parser for a model, by its chat template or else its architecture."""
    if template_source is None:
        return "none"
    for marks, name in _TEMPLATE_MARKS:
        if all(mark in template_source for mark in marks):
            return name
    return _ARCHITECTURES.get(architecture, "none")


def make_reply_parser(name: str, setting: ReplySetting) -> ReplyParser:
    """Make a parser for one reply; `name` is one of `REPLY_PARSERS`."""
    return REPLY_PARSERS[name](setting)
