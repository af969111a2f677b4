"""A model of a long context in a small KV cache: what its first user is told, and what requests get."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell, run_serve, start_cell
from tests.support.models.tiny_llama import TINY_CONFIG, write_tiny_llama
from tests.support.system.ports import free_port

CONTEXT = 131_072
ROOM = 2048
BLOCKS = "--worker.kv-cache-num-blocks=128"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_tiny_llama(tmp_path_factory.mktemp("long"))
    (model / "config.json").write_text(json.dumps({**TINY_CONFIG, "max_position_embeddings": CONTEXT}))
    return model


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("200k", "--max-model-len 200000 is above the model's own context of 131072 tokens"),
        (
            "128K",
            "--max-model-len 131072 does not fit: the KV cache holds 2048 tokens, so that is the largest; the worker's "
            "--kv-cache-num-blocks 8192 would hold 131072",
        ),
    ],
)
def test_a_context_that_cannot_be_served_ends_the_start_with_both_numbers(
    long_model: Path, flag: str, message: str
) -> None:
    address = f"--listen=127.0.0.1:{free_port()}"
    result = run_serve(str(long_model), address, BLOCKS, "--max-model-len", flag)
    assert result.returncode == 1
    *_, last_line = result.stderr.splitlines()
    assert last_line.startswith("error: the worker exited with code")
    assert message in last_line


@pytest.fixture(scope="module", params=[None, "1K"], ids=["auto", "1K"])
def cell(request: pytest.FixtureRequest, long_model: Path) -> Iterator[tuple[Cell, int]]:
    flags = [] if request.param is None else ["--max-model-len", request.param]
    with start_cell(long_model, BLOCKS, *flags) as started:
        yield started, CONTEXT if request.param is None else 1024


async def test_every_door_names_the_context_and_refuses_by_it(cell: tuple[Cell, int]) -> None:
    started, context = cell
    said = re.search(r"holds less than the context request_tokens=2048 (.*)", started.log())
    if context == CONTEXT:
        assert said is not None
        assert said[1] == f"context_length={CONTEXT} whole_context=--kv-cache-num-blocks 8192"
    else:
        assert said is None
    async with make_channel(started.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        info = await stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
        assert (info.context_length, info.num_pool_tokens) == (context, ROOM)
        sizes = [(ROOM - 8, 9, "KV_CAPACITY_EXCEEDED")] if context == CONTEXT else []
        sizes += [(context, 1, "PROMPT_TOO_LONG"), (10, context - 9, "CONTEXT_EXCEEDED")]
        for num_prompt_tokens, max_tokens, reason in sizes:
            request = tokenizer_pb2.GenerateRequest()
            request.tokens.token_ids.extend([5] * num_prompt_tokens)
            request.sampling.max_tokens = max_tokens
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub.Complete(tokenizer_pb2.CompleteRequest(request=request))
            assert reason_of(status_from_rpc_error(refusal.value)) == reason
