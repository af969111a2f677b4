"""Large bodies are read in processes of their own, which end alone."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.tokenizer.http import routes
from services.tokenizer.http.reading.body_readers import BodyReaders
from services.tokenizer.http.reading.crossing import pack, unpack
from services.tokenizer.http.reading.readers import READERS
from services.tokenizer.http.refusals import HttpError
from tests.support.system.polling import poll_until
from tests.support.system.processes import running_children
from tests.support.tokenizer.body_costs import arguments_of
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("read_chat_request", {"messages": MESSAGES, "tools": [TOOL], "logit_bias": {"1": 2}, "timeout_s": 1.5}),
    ("read_chat_request", {"messages": MESSAGES, "response_format": {"type": "json_object"}, "stream": True}),
    ("read_completion_request", {"prompt": [[1, 2], [3]], "echo": True}),
    ("read_messages_request", {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}]}),
    ("read_count_request", {"messages": MESSAGES, "system": "s"}),
    ("read_response_request", {"input": "hi", "tools": [{"type": "function", "name": "f"}], "metadata": {"a": "b"}}),
    ("read_response_request", {"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": "x"}]}),
    ("read_tokenize_request", {"prompt": "x", "return_token_strs": True}),
    ("read_tokenize_request", {"messages": MESSAGES}),
    ("read_detokenize_request", {"tokens": [1, 2**32 - 1]}),
    ("read_embedding_request", {"input": ["a", [5, 6]], "dimensions": 2, "encoding_format": "base64", "user": "x"}),
    ("read_score_request", {"text_1": ["a", "b"], "text_2": ["c", "d"], "timeout_s": 2, "user": "x"}),
    ("read_score_request", {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}),
    ("read_rerank_request", {"query": "a", "documents": [{"text": "b"}], "top_n": 1}),
    ("read_rerank_request", {"query": "a", "texts": ["b"], "raw_scores": True}),
]
NAMES = ("chat.messages[0].content", "chat.tools[0].name", "sampling.max_tokens", "structured_output", "chat", "prompt")
# 4 MB of lists take a second to read.
COSTLY = (
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [' + b"[]," * 1_300_000 + b"0]}}"
)


@pytest.fixture
async def readers() -> AsyncIterator[BodyReaders]:
    running = BodyReaders()
    yield running
    running.close()


def servers() -> list[psutil.Process]:
    """The processes that fork those that read bodies for this one."""
    return [each for each, command in running_children().items() if "read_process" in " ".join(command)]


async def reading() -> set[psutil.Process]:
    """The processes that read bodies for this one."""
    return {child for server in servers() for child in running_children(server.pid)}


def test_there_are_bodies_for_every_reader() -> None:
    assert {reader for reader, _ in BODIES} == READERS.keys()


@pytest.mark.parametrize(("reader", "body"), BODIES)
def test_a_request_crosses_as_it_was_read(reader: str, body: dict[str, Any]) -> None:
    read = READERS[reader](body, **arguments_of(reader))
    crossed = unpack(pack(read))
    assert type(crossed) is type(read)
    assert pack(crossed) == pack(read)
    if hasattr(read, "names"):
        assert [crossed.names(name) for name in NAMES] == [read.names(name) for name in NAMES]


def test_a_process_that_reads_has_neither_grpc_nor_the_server() -> None:
    # Handlers that gRPC sets for forks kill one forked process in twenty.
    code = (
        "import sys, services.tokenizer.http.reading.read_process; "
        "print([name for name in ('grpc', 'aiohttp', 'transformers', 'torch') if name in sys.modules])"
    )
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths)
    assert done.stdout == "[]\n"


@pytest.mark.process
async def test_a_large_body_is_answered_as_a_small_one_is(http: HttpService) -> None:
    padding = {"metadata": {"a": "x" * 100_000}}
    refused = await http.post("/v1/chat/completions", {"messages": MESSAGES, "temperature": 9.5, **padding})
    assert (refused.status, refused.error["param"]) == (400, "temperature")
    unread = await http.post("/v1/chat/completions", {"messages": [{"role": "x"}], **padding})
    assert (unread.status, unread.error["param"]) == (400, "messages[0].role")
    answer = await http.answer("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **padding}, [70])
    assert (answer.status, answer.value["usage"]["completion_tokens"]) == (200, 1)
    decoded = await http.post("/detokenize", {"tokens": [70] * 30_000})
    assert "at most 256" in decoded.error["message"]


@pytest.mark.process
async def test_the_process_that_reads_starts_before_the_first_large_body(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_WARM_UP_AFTER_S", 0.0)
    before = set(servers())
    async with run_http_service(model_dir, tmp_path) as http:
        [server] = await poll_until(lambda: asyncio.sleep(0, set(servers()) - before), bool)
        padding = {"metadata": {"a": "x" * 100_000}}
        answer = await http.answer("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **padding}, [70])
        assert answer.status == 200
        assert set(servers()) - before == {server}
    assert not set(servers()) - before


@pytest.mark.process
async def test_a_body_whose_client_has_left_is_read_no_longer(readers: BodyReaders) -> None:
    await readers.read("read_chat_request", {"request_id": "r"}, json.dumps(BODIES[0][1]).encode())
    [first] = await reading()
    left = asyncio.create_task(readers.read("read_chat_request", {"request_id": "r"}, COSTLY))
    await poll_until(lambda: asyncio.sleep(0, first.cpu_times().user), lambda used: used > 0.1)
    left.cancel()
    await poll_until(reading, lambda processes: first not in processes)
    read = await readers.read("read_completion_request", {"request_id": "r"}, b'{"prompt": "x"}')
    assert read.message.text == "x"


@pytest.mark.process
async def test_a_process_that_was_killed_is_replaced(readers: BodyReaders) -> None:
    for _ in range(2):
        read = await readers.read("read_completion_request", {"request_id": "r"}, b'{"prompt": "x"}')
        assert read.message.text == "x"
        [child] = await reading()
        child.send_signal(signal.SIGKILL)
        await poll_until(reading, lambda processes, dead=child: dead not in processes)  # type: ignore[misc]


@pytest.mark.process
async def test_a_body_that_takes_too_much_cpu_time_is_refused_alone() -> None:
    readers = BodyReaders(cpu_s=0.05)
    try:
        with pytest.raises(HttpError, match=r"more than 0.05 s of CPU time") as refused:
            await readers.read("read_chat_request", {"request_id": "r"}, COSTLY)
        assert refused.value.status == 400
    finally:
        readers.close()
