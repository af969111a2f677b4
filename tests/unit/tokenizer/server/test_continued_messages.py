"""A reply that goes on with the last message: in its answer, or in its reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from shared.request.limits import TOKEN_DTYPE
from tests.support.clients.client import Completion, read_answer
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' -}}
{{ '<think>' ~ message.reasoning_content ~ '</think>' if message.reasoning_content -}}
{{ message.content ~ '<|im_end|>' }}{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
TOOLS = [{"name": "look", "parameters": '{"type": "object", "properties": {"a": {"type": "string"}}}'}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    write_tiny_tokenizer(directory, chat_template=TEMPLATE)
    return directory


def request(*, content: str = "", reasoning: str = "", **fields: Any) -> tokenizer_pb2.GenerateRequest:
    """A request to go on with a message."""
    messages = [
        {"role": tokenizer_pb2.ROLE_USER, "content": "hi"},
        {"role": tokenizer_pb2.ROLE_ASSISTANT, "content": content, "reasoning": reasoning},
    ]
    chat = tokenizer_pb2.Chat(messages=messages, tools=TOOLS, continue_final_message=True)
    return tokenizer_pb2.GenerateRequest(chat=chat, **fields)


async def submit(
    service: Service, tokenizer: Tokenizer, message: tokenizer_pb2.GenerateRequest, reply: str
) -> tuple[Completion, exchange_pb2.Submit]:
    """The choice with this reply, and what the cell got of the request."""
    token_ids = tokenizer.encode(reply).ids
    call = service.stub.Generate(message)
    sent = await service.peer.submits.get()
    end = make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, len(token_ids))
    service.peer.send(Row(sent.handle, 0, token_ids), ends=[end])
    [choice] = (await read_answer(call)).choices.values()
    return choice, sent


CALL = '<tool_call>{"name": "look", "arguments": {"a": "b"}}</tool_call>'
HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.look <|message|>{"a": "b"}'


@pytest.mark.parametrize(
    ("parser", "message", "reply", "reasoning", "text"),
    [
        ("none", {"content": "The sky"}, " is blue", "", " is blue"),
        ("hermes", {"content": "The sky"}, f" is blue{CALL}", "", " is blue"),
        ("hermes", {"content": "The sky", "reasoning": "Hm."}, f" is blue{CALL}", "", " is blue"),
        ("hermes", {"reasoning": "Hm,"}, f" so.</think>Blue{CALL}", " so.", "Blue"),
        ("hermes", {"reasoning": "Hm,"}, "\nso.</think>\n\nBlue", "\nso.", "Blue"),
        # A content that opens the reasoning itself.
        ("hermes", {"content": "<think>Hm,"}, " so.</think>Blue", " so.", "Blue"),
        ("hermes", {"content": "<think>Hm.</think>The"}, " sky", "", " sky"),
        ("harmony", {"content": "The sky"}, f" is blue<|end|>{HARMONY_CALL}", "", " is blue"),
        (
            "harmony",
            {"reasoning": "Hm,"},
            f" so.<|end|><|start|>assistant<|channel|>final<|message|>Blue<|end|>{HARMONY_CALL}",
            " so.",
            "Blue",
        ),
    ],
)
async def test_a_reply_goes_on_where_the_message_ends(
    model_dir: Path,
    tmp_path: Path,
    tokenizer: Tokenizer,
    *,
    parser: str,
    message: dict[str, str],
    reply: str,
    reasoning: str,
    text: str,
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path, reply_parser=parser) as service:
        await service.link()
        choice, sent = await submit(service, tokenizer, request(**message), reply)
    assert (choice.reasoning, choice.text) == (reasoning, text)
    assert [call.arguments for call in choice.tool_calls] == ['{"a": "b"}'] * ("look" in reply)
    token_ids = np.frombuffer(sent.prompt_token_ids, TOKEN_DTYPE).tolist()
    prompt = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert prompt.endswith(message.get("content") or "<think>Hm,")


async def test_stops_and_forms_see_what_was_generated(model_dir: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    form = {"regex": "[a-z ]+"}
    async with run_tokenizer_service(model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        # The message has the stop string, and begins it once more at its end.
        stopped, _ = await submit(service, tokenizer, request(content="a. b.", stop=[". "]), " c. d")
        _, in_content = await submit(service, tokenizer, request(content="A", structured_output=form), "b")
        _, in_reasoning = await submit(service, tokenizer, request(reasoning="A", structured_output=form), "b")
    assert (stopped.text, stopped.reason) == (" c", "STOP_STRING")
    # The grammar of free text up to the end of the reasoning.
    assert "suffix" not in in_content.options.grammar
    assert "suffix" in in_reasoning.options.grammar


async def test_tokens_and_text_of_the_prompt_end_with_the_message(
    model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        chat = request(content="The sky").chat
        rendered = await service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
        assert rendered.text.endswith("<|im_start|>assistant\nThe sky")
        assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text


async def test_what_cannot_be_continued_is_refused(model_dir: Path, tmp_path: Path) -> None:
    user = {"role": tokenizer_pb2.ROLE_USER, "content": "hi"}
    assistant = {"role": tokenizer_pb2.ROLE_ASSISTANT}
    calling = {**assistant, "content": "x", "tool_calls": [{"name": "look"}]}
    async with run_tokenizer_service(model_dir, tmp_path) as service:
        await service.link()
        for last, expected in ((user, "assistant's message"), (calling, "without tool calls"), (assistant, "needs")):
            chat = tokenizer_pb2.Chat(messages=[user, last], continue_final_message=True)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.stub.Complete(tokenizer_pb2.CompleteRequest(request={"chat": chat}))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "chat.continue_final_message: " in (caught.value.details() or "")
            assert expected in (caught.value.details() or "")
