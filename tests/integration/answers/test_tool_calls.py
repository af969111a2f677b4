"""Tool calls through real services: what a model wrote comes back as history, and is gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import tokenizer_pb2
from shared.model_files.model_dir import TOKENIZER
from tests.support.cells.cell import REFERENCE
from tests.support.cells.split_cell import run_split_cell
from tests.support.clients.client import Client, connect
from tests.support.models.tool_caller import write_tool_caller

STRINGS = {"type": "string", "minLength": 1, "maxLength": 6}
PARAMETERS = {"type": "object", "properties": {"a": STRINGS, "b": {"enum": [1.5, None]}}, "required": ["a", "b"]}
TOOLS = [{"name": name, "parameters": json.dumps(PARAMETERS)} for name in ("look", "find")]
USER = {"role": tokenizer_pb2.ROLE_USER, "content": "hi"}


async def check_stop_strings(client: Client, close_id: int) -> None:
    """They end the text, not the arguments of calls."""
    text = "An answer. Question: b"
    parameters = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"]}
    asks = [{"name": "ask", "parameters": json.dumps(parameters)}]
    sampling = {"max_tokens": 300, "temperature": 1.0, "seed": 1, "logit_bias": {close_id: 8.0}}
    form = {"choices": {"texts": [text]}, "begins_at_once": True}
    chat = tokenizer_pb2.Chat(messages=[USER])
    answered = await client.generate(
        tokenizer_pb2.GenerateRequest(chat=chat, stop=["Question:"], structured_output=form, sampling=sampling)
    )
    assert (answered.text, answered.reason) == ("An answer. ", "STOP_STRING")
    chat = tokenizer_pb2.Chat(messages=[USER], tools=asks, tool_mode=tokenizer_pb2.TOOL_MODE_REQUIRED)
    called = await client.generate(tokenizer_pb2.GenerateRequest(chat=chat, stop=["Question:"], sampling=sampling))
    assert called.reason != "STOP_STRING"
    assert [json.loads(call.arguments) for call in called.tool_calls if called.reason == "EOS"] in ([], [{"a": text}])


@pytest.mark.slow
async def test_calls_come_back_as_history(tmp_path: Path) -> None:
    model_dir = write_tool_caller(tmp_path / "model")
    [close_id] = Tokenizer.from_file(str(model_dir / TOKENIZER)).encode("</think>").ids
    sampling = {"max_tokens": 200, "temperature": 1.0, "n": 4, "seed": 1, "logit_bias": {close_id: 4.0}}
    with run_split_cell(model_dir, REFERENCE) as cell:
        await cell.wait_until_serving("tokenizer")
        async with connect(cell) as client:
            info = await client.tokenizer.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
            assert (info.tool_parser, info.reasoning_parser) == ("hermes", "hermes")
            chat = tokenizer_pb2.Chat(
                messages=[USER],
                tools=TOOLS,
                tool_mode=tokenizer_pb2.TOOL_MODE_REQUIRED,
                allowed_tool_names=["find"],
                single_tool_call=True,
            )
            answer = await client.generate_choices(tokenizer_pb2.GenerateRequest(chat=chat, sampling=sampling))
            requests = []
            for choice in answer.choices.values():
                # Random weights may reason to the end.
                if not choice.tool_calls:
                    assert choice.reason == "MAX_TOKENS"
                    continue
                [call] = choice.tool_calls
                assert (call.name, choice.reason) == ("find", "EOS")
                arguments = json.loads(call.arguments)
                assert 1 <= len(arguments["a"]) <= 6
                assert arguments["b"] in (1.5, None)
                message = {
                    "role": tokenizer_pb2.ROLE_ASSISTANT,
                    "content": choice.text,
                    "reasoning": choice.reasoning,
                    "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments}],
                }
                result = {"role": tokenizer_pb2.ROLE_TOOL, "content": "x", "tool_call_id": call.id}
                begun = {"role": tokenizer_pb2.ROLE_ASSISTANT, "content": "The sky is"}
                history = tokenizer_pb2.Chat(
                    messages=[USER, message, result, begun], tools=TOOLS, continue_final_message=True
                )
                rendered = await client.tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(chat=history))
                assert json.dumps(arguments["a"], ensure_ascii=False) in rendered.text
                assert rendered.text.endswith("<|im_start|>assistant\nThe sky is")
                requests.append(
                    tokenizer_pb2.GenerateRequest(
                        chat=history, structured_output={"regex": "[ab]{4}"}, sampling={"max_tokens": 100}
                    )
                )
            assert requests, "no choice has a call"
            await check_stop_strings(client, close_id)
            for completion in await client.generate_all(requests):
                assert re.fullmatch("[ab]{4}", completion.text) or (completion.tool_calls and not completion.text)
