"""Every pair of options: the answer is the same alone, in a crowd, at any depth, drafted, and preempted.

Compared byte for byte on the `reference` backend, through all three services.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Answer, Client, connect
from tests.support.models.tiny_llama import write_noisy_copy
from tests.support.pairwise import pairwise_rows

BATCH = 16
MAX_TOKENS = 24
VOCABULARY = 512

# The values of each option; None omits it.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0, 1.7),
    "top_k": (None, 30),
    "top_p": (None, 0.9),
    "min_p": (None, 0.02),
    "repetition_penalty": (None, 1.3),
    "presence_penalty": (None, 0.6),
    "frequency_penalty": (None, -0.4),
    # The last value makes repetitive text, so that drafts are accepted.
    "logit_bias": (None, {5: 4.0, 260: -100.0, 300: 2.5}, {300: 30.0}),
    "bad_words": (None, [[270], [17, 33], [40, 41, 42]]),
    "min_tokens": (None, 12),
    "stop_token_ids": (None, [*range(20, 24)]),
    "stop_token_sequences": (None, [[300, 300, 300], *([token_id] for token_id in range(100, 107))]),
    "ignore_eos": (None, True),
    "num_logprobs": (None, 0, 4),
    "num_prompt_logprobs": (None, 2),
    "logprob_token_ids": (None, [300, 7, 300]),
    "n": (None, 3),
}
REQUEST: dict[str, tuple[Any, ...]] = {
    "prompt_length": (1, 17, 60),
    "stop": (None, ["a", "of the"]),
    "bad_strings": (None, ["e"]),
    "echo": (False, True),
    "include_stop": (False, True),
    "skip_special_tokens": (None, False),
    "regex": (None, "[a-z]{3,30}( [a-z]+){0,5}"),
}


def make_requests() -> list[tokenizer_pb2.GenerateRequest]:
    """Requests that cover all pairs of option values that one request may have, and random ones."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCABULARY) for _ in range(60)]
    factors = {**SAMPLING, **REQUEST}
    rows = pairwise_rows(factors, seed=5)
    rows += [{name: rng.choice(values) for name, values in factors.items()} for _ in range(2 * BATCH - len(rows))]
    return [_request(row, number, common, rng) for number, row in enumerate(rows)]


def _request(row: dict[str, Any], number: int, common: list[int], rng: random.Random) -> tokenizer_pb2.GenerateRequest:
    prompt = [*common[: row["prompt_length"] // 2]]
    # The prompt's end repeats its beginning, so that there is something to draft from.
    prompt += [rng.randrange(3, VOCABULARY) for _ in range(row["prompt_length"] - len(prompt))]
    if row["regex"] is not None:
        # A grammar ends the text with EOS, which must not be ignored.
        row = {**row, "ignore_eos": None}
    sampling = common_pb2.SamplingParams(max_tokens=MAX_TOKENS, seed=number)
    for name in SAMPLING:
        _set(sampling, name, row[name])
    request = tokenizer_pb2.GenerateRequest(
        tokens=common_pb2.TokenSequence(token_ids=prompt),
        sampling=sampling,
        stop=row["stop"] or [],
        bad_words=row["bad_strings"] or [],
        echo=row["echo"],
        include_stop=row["include_stop"],
        skip_special_tokens=row["skip_special_tokens"],
    )
    if row["regex"] is not None:
        request.structured_output.regex = row["regex"]
    return request


def _set(sampling: common_pb2.SamplingParams, name: str, value: Any) -> None:
    if value is None:
        return
    if name == "logit_bias":
        sampling.logit_bias.update(value)
    elif name in ("stop_token_ids", "logprob_token_ids"):
        getattr(sampling, name).extend(value)
    elif name in ("bad_words", "stop_token_sequences"):
        getattr(sampling, name).extend(common_pb2.TokenSequence(token_ids=ids) for ids in value)
    else:
        setattr(sampling, name, value)


def comparable(answer: Answer) -> list[tuple[Any, ...]]:
    """The parts of an answer that must be equal: all but times and cached tokens."""
    return [
        (
            place,
            choice.text,
            choice.token_ids,
            choice.reason,
            choice.finish.stop_string if choice.finish is not None else None,
            choice.finish.usage.num_completion_tokens if choice.finish is not None else None,
            [position.SerializeToString() for position in choice.logprobs],
            [position.SerializeToString() for position in choice.prompt_logprobs],
        )
        for place, choice in answer.choices.items()
    ]


async def in_batches(client: Client, requests: list[tokenizer_pb2.GenerateRequest]) -> list[list[tuple[Any, ...]]]:
    """Send the requests sixteen at a time."""
    answers: list[Answer] = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        answers += await asyncio.gather(*(client.generate_choices(request) for request in batch))
    return [comparable(answer) for answer in answers]


@pytest.fixture(scope="module")
def requests() -> list[tokenizer_pb2.GenerateRequest]:
    return make_requests()


@pytest.fixture(scope="module")
def draft_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` with noise on its weights: its drafts are often, but not always, right."""
    return write_noisy_copy(tiny_model, tmp_path_factory.mktemp("draft-model"))


@pytest.fixture(scope="module")
def alone(reference_cell: Cell, requests: list[tokenizer_pb2.GenerateRequest]) -> list[list[tuple[Any, ...]]]:
    async def run() -> list[list[tuple[Any, ...]]]:
        async with connect(reference_cell) as client:
            return [comparable(await client.generate_choices(request)) for request in requests]

    return asyncio.run(run())


def test_the_requests_ask_for_everything_and_get_it(
    requests: list[tokenizer_pb2.GenerateRequest], alone: list[list[tuple[Any, ...]]]
) -> None:
    reasons = {choice[3] for answer in alone for choice in answer}
    assert reasons >= {"EOS", "MAX_TOKENS", "STOP_STRING", "STOP_TOKEN", "STOP_SEQUENCE"}
    for request, answer in zip(requests, alone, strict=True):
        sampling, num_prompt_tokens = request.sampling, len(request.tokens.token_ids)
        assert len(answer) == (sampling.n or 1)
        for (_, choice), _, token_ids, _, _, _, logprobs, prompt_logprobs in answer:
            assert token_ids
            is_scored = sampling.HasField("num_logprobs") or sampling.logprob_token_ids
            assert len(logprobs) == (len(token_ids) if is_scored else 0)
            for data in logprobs:
                requested = common_pb2.PositionLogprobs.FromString(data).requested
                assert [entry.token_id for entry in requested] == sampling.logprob_token_ids
            has_prompts = sampling.HasField("num_prompt_logprobs") and choice == 0
            assert len(prompt_logprobs) == (num_prompt_tokens - 1 if has_prompts else 0)


async def test_in_a_crowd(
    reference_cell: Cell, requests: list[tokenizer_pb2.GenerateRequest], alone: list[list[tuple[Any, ...]]]
) -> None:
    async with connect(reference_cell) as client:
        before = await client.wait_until_idle()
        assert await in_batches(client, requests) == alone
        assert (await client.wait_until_idle()).num_preemptions == before.num_preemptions


MAX_ROUNDS = 20
FEW_BLOCKS = "--worker.kv-cache-num-blocks=16"
DRAFTS = "--worker.draft-proposer=ngram"
# The fixture's directory is appended.
DRAFT_MODEL = "--draft-model="
DRAFT_TOKENS = "--worker.num-draft-tokens=5"
CHUNKS = ("--scheduler.max-num-seqs=16", "--scheduler.max-num-batched-tokens=32")
ACCEPTED, PREEMPTED = "num_accepted_draft_tokens", "num_preemptions"


@pytest.mark.parametrize(
    ("flags", "counters"),
    [
        pytest.param([FEW_BLOCKS, "--scheduler.max-steps-in-flight=1"], [PREEMPTED], marks=pytest.mark.slow),
        ([FEW_BLOCKS, DRAFTS, DRAFT_TOKENS, *CHUNKS], [PREEMPTED, ACCEPTED]),
        pytest.param([FEW_BLOCKS, DRAFT_MODEL, DRAFT_TOKENS, *CHUNKS], [PREEMPTED, ACCEPTED], marks=pytest.mark.slow),
    ],
    ids=["preempted-depth-1", "drafts-preempted-chunked", "draft-model-preempted-chunked"],
)
async def test_in_a_crowd_on_another_cell(
    tiny_model: Path,
    draft_model: Path,
    requests: list[tokenizer_pb2.GenerateRequest],
    alone: list[list[tuple[Any, ...]]],
    flags: list[str],
    counters: list[str],
) -> None:
    flags = [f"{flag}{draft_model}" if flag == DRAFT_MODEL else flag for flag in flags]
    with start_cell(tiny_model, REFERENCE, *flags) as cell:
        async with connect(cell) as client:
            # Until the features under test were used: on a busy machine requests may arrive one after the other.
            for _ in range(MAX_ROUNDS):
                assert await in_batches(client, requests) == alone
                state = await client.wait_until_idle()
                if all(getattr(state, counter) > 0 for counter in counters):
                    return
    pytest.fail(f"not all of {counters} in {MAX_ROUNDS} rounds")
