"""On `reference` outputs are byte-identical whatever the batch, caching, block size, preemption or cancellations."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, Completion, connect, token_request

NUM_REQUESTS = 32
NUM_TOKENS = 16
MAX_PROMPT = 60
MAX_ROUNDS = 20
NUM_REAL_TOKENS = 10


def make_requests(
    logits_width: int, *, count: int = NUM_REQUESTS, max_prompt: int = MAX_PROMPT
) -> list[tokenizer_pb2.GenerateRequest]:
    """Greedy and sampled requests of many lengths; half of them have a common prefix."""
    rng = random.Random(11)
    common = [rng.randrange(3, logits_width) for _ in range(max_prompt)]
    requests = []
    for number in range(count):
        length = rng.randint(1, max_prompt)
        own = [rng.randrange(3, logits_width) for _ in range(length)]
        prompt = (common[: length // 2] + own)[:length] if number % 2 else own
        sampling = [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": number},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": number},
            {"temperature": 1.5, "top_p": 0.8, "seed": number},
        ][number // 2 % 4]
        requests.append(token_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling))
    return requests


async def run_alone(client: Client, requests: list[tokenizer_pb2.GenerateRequest]) -> list[Completion]:
    return [await client.generate(request) for request in requests]


def outputs(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(completion.token_ids, completion.text) for completion in completions]


@pytest.fixture(scope="module")
def requests() -> list[tokenizer_pb2.GenerateRequest]:
    return make_requests(512)


@pytest.fixture(scope="module")
def alone(reference_cell: Cell, requests: list[tokenizer_pb2.GenerateRequest]) -> list[tuple[list[int], str]]:
    async def run() -> list[Completion]:
        async with connect(reference_cell) as client:
            return await run_alone(client, requests)

    return outputs(asyncio.run(run()))


async def test_32_requests_at_once_without_a_prefix_cache(
    reference_cell: Cell, requests: list[tokenizer_pb2.GenerateRequest], alone: list[tuple[list[int], str]]
) -> None:
    async with connect(reference_cell) as client:
        assert outputs(await client.generate_all(requests)) == alone
        assert (await client.wait_until_idle()).num_prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("flags", "is_preempted"),
    [
        (["--scheduler.kv-cache-block-size=1", "--scheduler.max-steps-in-flight=1"], False),
        (
            [
                "--scheduler.kv-cache-block-size=16",
                "--worker.kv-cache-num-blocks=24",
                "--scheduler.max-num-seqs=40",
                "--scheduler.max-num-batched-tokens=40",
                "--scheduler.enable-mixed-steps=true",
                "--scheduler.max-steps-in-flight=3",
            ],
            True,
        ),
        pytest.param(
            [
                "--scheduler.kv-cache-block-size=32",
                "--scheduler.max-num-seqs=40",
                "--scheduler.max-num-batched-tokens=40",
            ],
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["blocks of 1, no overlap", "few blocks of 16, chunks in mixed steps", "blocks of 32, chunks"],
)
async def test_block_sizes_overlap_chunks_and_preemptions_with_a_prefix_cache(
    tiny_model: Path,
    requests: list[tokenizer_pb2.GenerateRequest],
    alone: list[tuple[list[int], str]],
    flags: list[str],
    is_preempted: bool,
) -> None:
    with start_cell(tiny_model, REFERENCE, *flags) as cell:
        async with connect(cell) as client:
            assert outputs(await client.generate_all(requests)) == alone
            # Again, now with prefix cache hits.
            assert outputs(await client.generate_all(requests)) == alone
            state = await client.wait_until_idle()
    assert state.num_prefix_hit_tokens > 0
    assert state.num_cached_blocks > 0
    assert (state.num_preemptions > 0) is is_preempted


async def test_cancelled_neighbours_give_their_blocks_back_and_disturb_no_request(
    reference_cell: Cell, requests: list[tokenizer_pb2.GenerateRequest], alone: list[tuple[list[int], str]]
) -> None:
    async def cancel_after(request: tokenizer_pb2.GenerateRequest, num_responses: int) -> None:
        call = client.tokenizer.Generate(request)
        for _ in range(num_responses):
            await call.read()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()

    neighbours = make_requests(512, count=16)
    for request in neighbours:
        request.sampling.max_tokens = 400
    async with connect(reference_cell) as client:
        kept = asyncio.create_task(client.generate_all(requests))
        await asyncio.gather(*(cancel_after(request, number % 4) for number, request in enumerate(neighbours)))
        assert outputs(await kept) == alone
        state = await client.wait_until_idle()
    # They were asked for 400 tokens each; they have stopped and their blocks are free.
    assert state.num_free_blocks == state.num_blocks


# On this backend each row reads all weights.
@pytest.mark.slow
async def test_the_real_model_alone_and_together_with_preemptions(real_model: Path) -> None:
    requests = make_requests(49_152, count=5, max_prompt=32)
    for request in requests:
        request.sampling.max_tokens = NUM_REAL_TOKENS
    with start_cell(real_model, REFERENCE, "--worker.kv-cache-num-blocks=6") as cell:
        async with connect(cell) as client:
            expected = outputs(await run_alone(client, requests))
            # On a busy machine requests may arrive one after the other, and none is preempted.
            for _ in range(MAX_ROUNDS):
                assert outputs(await client.generate_all(requests)) == expected
                if (await client.wait_until_idle()).num_preemptions > 0:
                    return
    pytest.fail(f"nothing was preempted in {MAX_ROUNDS} rounds")
