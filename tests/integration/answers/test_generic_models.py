"""A model that runs transformers' own code, through all three services, on two ranks.

Its norms of queries and keys are over all heads, so that each rank has the attention whole, and a part of the rest.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.cells.cell import FLOAT32, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.clients.token_client import reason
from tests.support.models.generic_configs import GENERIC_CONFIGS
from tests.support.models.parity import TransformersModel, make_prompts, wrong_tokens
from tests.support.models.small_models import build_model, write_small_model

PROMPTS = make_prompts((1, 70, 16, 40), seed=9)
NUM_TOKENS = 16
FLAGS = (
    "--worker.num-threads=1",
    "--scheduler.max-num-seqs=8",
    "--scheduler.max-num-batched-tokens=32",
    "--scheduler.enable-mixed-steps=true",
    *FLOAT32,
)


async def test_tokens_on_two_ranks_are_those_of_transformers(tmp_path: Path) -> None:
    model = build_model("Olmo2ForCausalLM", GENERIC_CONFIGS["Olmo2ForCausalLM"])
    directory = write_small_model(model, tmp_path / "model")
    requests = [token_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    exact = token_request(PROMPTS[0], max_tokens=1)
    exact.determinism = common_pb2.DETERMINISM_EXACT
    with start_cell(directory, "--tp=2", *FLAGS) as cell:
        async with connect(cell) as client:
            info = await client.tokenizer.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
            completions = await asyncio.gather(*map(client.generate, requests))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.generate(exact)
        assert "implementation=transformers-" in cell.log()
        assert "each rank computes layers whole" in cell.log()
    assert info.implementation == "transformers"
    assert not info.has_exact_determinism
    assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE")
    theirs = TransformersModel(model)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert wrong_tokens(theirs, prompt, completion.token_ids) == []
