"""Chats with models that see images: the text is served by their templates, and replies are read by their formats."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.request.model import load_model
from shared.model_files.model_dir import TOKENIZER
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.tokenizer.vision_templates import MAGISTRAL_SMALL, MISTRAL_SMALL, QWEN3_VL, QWEN3_VL_THINKING

# Tokens of both families.
MARKUP = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<tool_call>", "</tool_call>")
MISTRAL, QWEN = "Mistral3ForConditionalGeneration", "Qwen3VLForConditionalGeneration"
CALL = tokenizer_pb2.ToolCall(id="call-1", name="search", arguments='{"query": "a"}')
CHAT = tokenizer_pb2.Chat(
    messages=[
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_SYSTEM, content="Be brief."),
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="What is a?"),
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_ASSISTANT, tool_calls=[CALL]),
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_TOOL, content="A letter.", tool_call_id="call-1"),
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="And b?"),
    ],
    tools=[tokenizer_pb2.Tool(name="search")],
)
CASES = {
    "Mistral Small 3.2": (MISTRAL, MISTRAL_SMALL, "mistral", "", "[TOOL_CALLS]search"),
    "Magistral Small": (MISTRAL, MAGISTRAL_SMALL, "mistral", "mistral", "[TOOL_CALLS]search"),
    "Qwen3-VL-Instruct": (QWEN, QWEN3_VL, "hermes", "", '<tool_call>\n{"name": "search"'),
    "Qwen3-VL-Thinking": (QWEN, QWEN3_VL_THINKING, "hermes", "hermes", '<tool_call>\n{"name": "search"'),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_format_of_replies_is_that_of_the_template(tmp_path: Path, case: str) -> None:
    architecture, template, tool_parser, reasoning_parser, call = CASES[case]
    text = {"vocab_size": 600, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    write_tiny_tokenizer(tmp_path, chat_template=template)
    tokenizer = Tokenizer.from_file(str(tmp_path / TOKENIZER))
    tokenizer.add_tokens([AddedToken(text) for text in MARKUP])
    tokenizer.save(str(tmp_path / TOKENIZER))
    with closing(load_model(TokenizerSettings(model_dir=tmp_path))) as model:
        rendered, _ = await model.prompts.render_chat(check_chat(CHAT), 4096)
        parsers = model.reply_parsers
        assert (parsers.tool_parser, parsers.reasoning_parser) == (tool_parser, reasoning_parser)
    for part in ("Be brief.", "What is a?", call, '{"query": "a"}', "A letter.", "And b?"):
        assert part in rendered
