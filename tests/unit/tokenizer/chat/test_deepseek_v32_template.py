"""Chats of DeepSeek-V3.2, written out by hand after its published encoding."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from services.tokenizer.chat.chat_template import ChatTemplate, load_chat_template
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall
from services.tokenizer.replies import choose_reply_parser
from services.tokenizer.text.model_tokenizer import load_tokenizer
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

CALLS = (ToolCall("1", "look", {"word": "é\n", "n": 1, "of": [None]}), ToolCall("2", "now", {}))
CALLS_TEXT = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="look">
<｜DSML｜parameter name="word" string="true">é
</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="of" string="false">[null]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">

</｜DSML｜invoke>
</｜DSML｜function_calls>"""
RESULTS_TEXT = "\n\n<function_results>\n<result>a</result>\n<result>b</result>\n</function_results>\n\n"
WITH_CALLS = (
    Message("user", "Hi"),
    Message("assistant", "So:", CALLS, reasoning="Hm."),
    Message("tool", "a", tool_call_id="1"),
    Message("tool", "b", tool_call_id="2"),
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatTemplate]:
    """That of a directory with none of its own."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory, chat_template=None)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": BOS}))
    tokenizer = load_tokenizer(directory)
    assert load_chat_template(tokenizer, timeout_s=5, architecture="LlamaForCausalLM") is None
    made = load_chat_template(tokenizer, timeout_s=5, architecture="DeepseekV32ForCausalLM")
    assert made is not None
    assert made.takes_tools
    yield made
    made.close()


def rendered(template: ChatTemplate, messages: list[Message], *tools: Tool, **variables: bool) -> str:
    return template.render(template.fields(Conversation(tuple(messages), tools, variables=dict(variables))))


@pytest.mark.parametrize(
    ("messages", "thinks", "expected"),
    [
        ([Message("user", "Hi")], False, f"{BOS}{USER}Hi{ASSISTANT}</think>"),
        ([Message("system", "S"), Message("user", "Hi")], True, f"{BOS}S{USER}Hi{ASSISTANT}<think>"),
        (
            [Message("user", "a"), Message("assistant", "b", reasoning="r"), Message("user", "c")],
            True,
            f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}<think>",
        ),
        ([*WITH_CALLS], False, f"{BOS}{USER}Hi{ASSISTANT}</think>So:{CALLS_TEXT}{EOS}{RESULTS_TEXT}</think>"),
        ([*WITH_CALLS], True, f"{BOS}{USER}Hi{ASSISTANT}<think>Hm.</think>So:{CALLS_TEXT}{EOS}{RESULTS_TEXT}<think>"),
    ],
)
def test_a_chat_is_encoded_as_published(
    template: ChatTemplate, messages: list[Message], thinks: bool, expected: str
) -> None:
    for name in ("thinking", "enable_thinking"):
        assert rendered(template, messages, **{name: thinks}) == expected


def test_tools_are_in_the_system_message(template: ChatTemplate) -> None:
    tool = Tool("look", "Looks up é", {"type": "object"})
    listed = (
        '\n<functions>\n{"name": "look", "description": "Looks up é", "parameters": {"type": "object"}}\n</functions>\n'
    )
    for before in ((), (Message("system", "S"),)):
        text = rendered(template, [*before, Message("user", "Hi")], tool)
        assert text.startswith(f"{BOS}{'S' if before else ''}\n\n## Tools\nYou have access")
        assert text.endswith(f"{listed}{USER}Hi{ASSISTANT}</think>")


def test_the_parser_is_that_of_the_family(template: ChatTemplate) -> None:
    assert choose_reply_parser("DeepseekV32ForCausalLM", template.text) == "deepseek_v32"
