"""What clients write is in no log, metric, error or crash, whatever becomes of their requests."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from lockstep.v1 import scheduler_pb2, tokenizer_pb2
from services.cli.processes.service_command import ROLES
from shared.network.rpc import make_channel
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import Client, connect, greedy
from tests.support.clients.text_fields import messages_with_text
from tests.support.system.scraping import get

# No token of its own, so that no answer has it, and a name that every field of names allows.
CANARY = "Zqxcanary7vjk"
# What quotes it may cut it.
PART = "canary7"
Request, Score = tokenizer_pb2.GenerateRequest, tokenizer_pb2.ScoreRequest
User = tokenizer_pb2.ROLE_USER

BASES: dict[str, Callable[[], Message]] = {
    "GenerateRequest": lambda: Request(text="Hello", sampling=greedy(max_tokens=3)),
    "SchedulerServiceGenerateRequest": lambda: scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=[1, 2], sampling=greedy(max_tokens=3)
    ),
    "ScoreRequest": lambda: Score(pairs={"queries": ["q"], "documents": ["d"]}),
    "ChatMessage": lambda: tokenizer_pb2.ChatMessage(role=User, content="x"),
    "Chat": tokenizer_pb2.Chat,
    "Tool": lambda: tokenizer_pb2.Tool(name="tool"),
    "ToolCall": lambda: tokenizer_pb2.ToolCall(name="tool"),
}

# What is not JSON is named by its place, which has the client's names.
NOT_JSON = f'{{"{CANARY}": {{"{CANARY}": NaN}}}}'

BAD_FORMS = [
    tokenizer_pb2.StructuredOutput(json_schema=NOT_JSON),
    tokenizer_pb2.StructuredOutput(json_schema=f'{{"type": "{CANARY}"}}'),
    tokenizer_pb2.StructuredOutput(json_schema=f'{{"{CANARY}'),
    tokenizer_pb2.StructuredOutput(json_schema=f'{{"const": "{CANARY}", "{CANARY}": 1, "not": {{}}}}'),
    tokenizer_pb2.StructuredOutput(json_schema=f'{{"$ref": "#/$defs/{CANARY}"}}'),
    tokenizer_pb2.StructuredOutput(regex=f"({CANARY}"),
    tokenizer_pb2.StructuredOutput(regex=f"\\b{CANARY}(?!x)"),
    tokenizer_pb2.StructuredOutput(grammar=f"start: {CANARY}"),
    tokenizer_pb2.StructuredOutput(grammar=f'root ::= "{CANARY}" {CANARY}'),
]

BAD_REQUESTS = [
    *(Request(text="Hello", structured_output=form) for form in BAD_FORMS),
    Request(text="Hello", model=CANARY),
    Request(text="Hello", request_id=f"{CANARY} {CANARY}"),
    Request(text=CANARY * 100_000),
    Request(text="Hello", stop=[CANARY * 100]),
    Request(text="Hello", bad_words=[CANARY * 100]),
    Request(text="Hello", cache_salt=CANARY * 10),
    Request(text=CANARY, sampling=greedy(max_tokens=1_000_000)),
    Request(chat=tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(content=CANARY)])),
    Request(
        chat=tokenizer_pb2.Chat(
            messages=[tokenizer_pb2.ChatMessage(role=User, content="x")],
            tools=[tokenizer_pb2.Tool(name="tool", parameters=NOT_JSON)],
            template_variables=NOT_JSON,
        )
    ),
    Request(
        chat=tokenizer_pb2.Chat(
            messages=[tokenizer_pb2.ChatMessage(role=User, content="x")],
            tools=[tokenizer_pb2.Tool(name=f"{CANARY} {CANARY}", parameters=f"{{{CANARY}")],
            template_variables=f'{{"{CANARY}": {CANARY}}}',
        )
    ),
    Request(
        chat=tokenizer_pb2.Chat(
            messages=[tokenizer_pb2.ChatMessage(role=User, content="x")],
            tools=[tokenizer_pb2.Tool(name=CANARY, parameters=f'{{"type": "{CANARY}"}}')],
            tool_mode=tokenizer_pb2.TOOL_MODE_REQUIRED,
        )
    ),
    Request(
        chat=tokenizer_pb2.Chat(
            messages=[
                tokenizer_pb2.ChatMessage(
                    role=tokenizer_pb2.ROLE_ASSISTANT,
                    content=CANARY,
                    tool_calls=[tokenizer_pb2.ToolCall(name=CANARY, arguments=f'{{"{CANARY}": ')],
                )
            ],
            template_variables=f'{{"messages": "{CANARY}"}}',
        )
    ),
]

# A template that fails with what the client wrote, as those of many models do.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}
{%- if 'fail' in message.name %}{{ raise_exception('name: ' ~ message.name) }}{% endif -%}
{%- if 'break' in message.name %}{{ message.content / 2 }}{% endif -%}
<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>
{%- endfor %}"""

# The same for documents.
SCORE_TEMPLATE = """\
{%- for message in messages %}
{%- if 'fail' in message.content %}{{ raise_exception('document: ' ~ message.content) }}{% endif -%}
{{ message.content }}
{%- endfor %}"""


@pytest.fixture(scope="module")
def watched(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell that logs all it can; its management ports are in its log."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    directory.mkdir()
    for file in tiny_model.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    flags = [f"--{role}.manage-listen=127.0.0.1:0" for role in ROLES]
    score_template = directory.parent / "scores.jinja"
    score_template.write_text(SCORE_TEMPLATE, encoding="utf-8")
    flags += [f"--tokenizer.score-template={score_template}", "--tokenizer.score-labels=y,n"]
    with start_cell(directory, "--log-level=debug", *flags) as cell:
        yield cell


async def pages(cell: Cell) -> str:
    """What the management ports of all processes have served so far."""
    ports = re.findall(r"serving metrics and probes .*'127.0.0.1', (\d+)", cell.log())
    bodies = []
    for port in ports:
        with contextlib.suppress(OSError):
            bodies.append((await get(f"127.0.0.1:{port}", "/metrics")).body)
    assert len(bodies) >= len(ROLES)
    return "".join(bodies)


async def error_of(call: Any) -> str:
    """All that a failed call returns; empty if it succeeds."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return f"{error.details()} {error.debug_error_string()} {error.trailing_metadata()} {error.initial_metadata()}"
    return ""


async def unary_error_of(call: Any) -> str:
    """The same for a call with one answer."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return f"{error.details()} {error.trailing_metadata()}"
    return ""


async def check_silence(cell: Cell, errors: dict[str, str]) -> None:
    """The canary is in no error, unless as a model that is not served, and in no log or metric."""
    shown = {name: error for name, error in errors.items() if PART in error}
    assert {name: error for name, error in shown.items() if "MODEL_NOT_FOUND" not in error} == {}
    # A request's id is for logs, and the only text there.
    lines = [re.sub(rf"request_id={CANARY}(-\d+)?\b", "request_id=", line) for line in cell.log().splitlines()]
    assert [line for line in lines if PART in line] == []
    assert PART not in await pages(cell)


async def send_each(client: Client, requests: dict[str, Message]) -> dict[str, str]:
    """Send requests one after the other; the errors by their names."""
    errors = {}
    for name, request in requests.items():
        if isinstance(request, scheduler_pb2.SchedulerServiceGenerateRequest):
            errors[name] = await error_of(client.scheduler.Generate(request))
        elif isinstance(request, Score):
            errors[name] = await unary_error_of(client.tokenizer.Score(request))
        else:
            errors[name] = await error_of(client.tokenizer.Generate(request))
    return errors


async def test_no_text_field_of_a_request_shows_anywhere(watched: Cell) -> None:
    descriptors = [Request.DESCRIPTOR, Score.DESCRIPTOR, scheduler_pb2.SchedulerServiceGenerateRequest.DESCRIPTOR]
    requests = {
        f"{descriptor.name}.{path}": request
        for descriptor in descriptors
        for path, request in messages_with_text(descriptor, CANARY, BASES)
    }
    assert {"GenerateRequest.text", "GenerateRequest.chat.tools.description", "GenerateRequest.stop"} < requests.keys()
    async with connect(watched) as client:
        errors = await send_each(client, requests)
        stub = client.tokenizer
        errors["Tokenize"] = await unary_error_of(stub.Tokenize(tokenizer_pb2.TokenizeRequest(text=CANARY)))
        for name in ("Hello", "fail", "break"):
            message = tokenizer_pb2.ChatMessage(role=User, content=CANARY, name=f"{name} {CANARY}")
            chat = tokenizer_pb2.Chat(messages=[message])
            errors[name] = await error_of(stub.Generate(Request(chat=chat, sampling=greedy(max_tokens=3))))
            request = tokenizer_pb2.RenderChatRequest(chat=chat)
            errors[f"render {name}"] = await unary_error_of(stub.RenderChat(request))
        pairs = tokenizer_pb2.ScorePairs(queries=[CANARY], documents=[f"fail {CANARY}"])
        errors["a failing document"] = await unary_error_of(stub.Score(Score(pairs=pairs)))
    assert "" in errors.values(), "every request was refused"
    assert errors["fail"], "the template did not fail"
    assert "pairs.documents" in errors["a failing document"]
    assert errors["ScoreRequest.pairs.documents"] == ""
    await check_silence(watched, errors)


async def test_no_refused_text_shows_anywhere(watched: Cell) -> None:
    async with connect(watched) as client:
        errors = await send_each(client, {str(number): request for number, request in enumerate(BAD_REQUESTS)})
    assert "" not in errors.values()
    await check_silence(watched, errors)


async def test_a_message_that_cannot_be_parsed_shows_nowhere(watched: Cell) -> None:
    text = CANARY.encode()
    broken = {
        "not UTF-8": b"\x1a" + bytes([len(text) + 1]) + text + b"\xff",
        "cut off": b"\x1a\x7f" + text,
        "no message": text,
    }
    errors = {}
    async with make_channel(watched.address) as channel:
        for name, data in broken.items():
            errors[name] = await error_of(channel.unary_stream("/lockstep.v1.TokenizerService/Generate")(data))
            assert errors[name]
    await check_silence(watched, errors)


async def test_a_crash_shows_nothing_of_what_was_computed(watched: Cell) -> None:
    async with connect(watched) as client:
        request = Request(text=CANARY, stop=[CANARY], sampling=greedy(max_tokens=400, ignore_eos=True))
        for name, number in (("worker", signal.SIGABRT), ("scheduler", signal.SIGSEGV), ("tokenizer", signal.SIGABRT)):
            call = client.tokenizer.Generate(request)
            await call.read()
            await call.read()
            process_id = watched.send_signal(name, number)
            errors = {name: await error_of(call)}
            await watched.wait_until_serving(name, instead_of=process_id)
            await watched.wait_until_serving("tokenizer")
            await check_silence(watched, errors)
