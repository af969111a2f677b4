"""Cells of many ranks generate the same tokens as one worker, in every layout of ranks.

On `reference`. TP changes the order of sums, so two TP sizes may differ where two logits are almost equal; at a given
TP size nothing else changes a byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.capturing_worker import REPLAYED
from tests.support.cells.cell import REFERENCE, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.models.parity import TransformersModel, make_prompts, wrong_tokens
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.pairwise import pairwise_rows
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import start_module

MAX_PROCESSES = 8
MAX_SLOW_PROCESSES = 3
NUM_TOKENS = 24
LIMITS = ("--scheduler.max-num-seqs=16", "--scheduler.max-num-batched-tokens=64")
PROMPTS = make_prompts((1, 40, 16, 70, 5, 33, 40, 9), seed=4)

# A dense family, and every family with experts. Heads that 2 and 3 ranks can split, and shared ones that they cannot.
_HEADS = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}
_LATENT_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_HEADS, "num_key_value_heads": 1},
    "Qwen3MoeForCausalLM": _HEADS,
    "MixtralForCausalLM": _HEADS,
    "GptOssForCausalLM": _HEADS,
    "Glm4MoeForCausalLM": _HEADS,
    "DeepseekV32ForCausalLM": _LATENT_HEADS,
    "GlmMoeDsaForCausalLM": _LATENT_HEADS,
}
DENSE_FAMILIES = ("LlamaForCausalLM",)

# The real model has 9 query heads and 3 key/value heads.
REAL_TP = 3
NUM_REAL_REQUESTS = 4
NUM_REAL_TOKENS = 10
# Tokens with closer logits may swap order when sums are reordered.
MIN_MARGIN = 1e-3
POLL_S = 0.02

Tokens = list[list[int]]


def cases() -> Iterator[Any]:
    """Layouts of ranks: one for each pair of sizes, and for `make proofs` also for each pair with a family.

    What takes more than three processes is left to `make proofs` too.
    """
    sizes: dict[str, list[Any]] = {"tp": [1, 2, 3], "dp": [1, 2, 4], "ep": [False, True]}
    layouts = pairwise_rows(sizes, seed=1)
    pairs = {_case({**row, "family": family}) for row, family in zip(layouts, cycle(FAMILIES), strict=False)}
    slow = {case for case in pairs if case[1] * case[2] <= MAX_SLOW_PROCESSES}
    rows = pairwise_rows({"family": list(FAMILIES), **sizes}, seed=1)
    proof = {case for case in pairs.union(map(_case, rows)) if case[1] * case[2] <= MAX_PROCESSES} - slow
    yield from (pytest.param(*case, marks=pytest.mark.slow) for case in sorted(slow))
    yield from (pytest.param(*case, marks=pytest.mark.proof) for case in sorted(proof))


def _case(row: Mapping[str, Any]) -> tuple[str, int, int, bool]:
    """A layout of a family; dense ones have no experts to split."""
    return row["family"], row["tp"], row["dp"], row["ep"] and row["family"] not in DENSE_FAMILIES


class Models:
    """Small models of the families, each built once, with cached answers of their cells."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._theirs: dict[str, TransformersModel] = {}
        self._said: dict[tuple[str, int, int, bool], Tokens] = {}

    def directory_of(self, family: str) -> Path:
        """The directory of a family's model."""
        model_dir = self._directory / family
        if family not in self._theirs:
            config = next(iter(SMALL_CONFIGS[family].values()))
            model = build_model(family, {**config, **FAMILIES[family]})
            write_small_model(model, model_dir)
            self._theirs[family] = TransformersModel(model)
        return model_dir

    def theirs(self, family: str) -> TransformersModel:
        """transformers' model."""
        self.directory_of(family)
        return self._theirs[family]

    async def ask(self, family: str, tp: int, *, dp: int = 1, ep: bool = False) -> Tokens:
        """The answers of a cell; each cell runs only once."""
        layout = (family, tp, dp, ep)
        if layout not in self._said:
            self._said[layout] = await ask(self.directory_of(family), tp=tp, dp=dp, ep=ep)
        return self._said[layout]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def requests() -> list[tokenizer_pb2.GenerateRequest]:
    """Each prompt, greedy and sampled."""
    greedy = [token_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    sampled = [
        token_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, top_p=0.95, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    return greedy + sampled


async def ask(model_dir: Path, *, tp: int = 1, dp: int = 1, ep: bool = False) -> Tokens:
    """The answers of a cell to all requests at once, in prefills of a few prompts."""
    layout = [f"--tp={tp}", f"--dp={dp}", *(["--ep"] if ep else [])]
    with start_cell(model_dir, REFERENCE, *layout, *LIMITS) as cell:
        async with connect(cell) as client:
            # The cell is serving as soon as the first rank is attached.
            await client.wait_until(lambda state: all(rank.is_attached for rank in state.rank_steps))
            completions = await client.generate_all(requests())
            state = await client.wait_until_idle()
    assert len(state.rank_steps) == dp
    # Every rank got some of the requests.
    assert all(rank.num_prefill_steps for rank in state.rank_steps)
    return [completion.token_ids for completion in completions]


def assert_greedy(theirs: TransformersModel, tokens: Tokens) -> None:
    """Check the completions of the greedy requests, which are the first ones."""
    for prompt, completion in zip(PROMPTS, tokens, strict=False):
        assert len(completion) == NUM_TOKENS
        assert wrong_tokens(theirs, prompt, completion) == []


async def test_two_coupled_groups_of_two_ranks_generate_the_tokens_of_transformers(models: Models) -> None:
    family = "Qwen3MoeForCausalLM"
    assert_greedy(models.theirs(family), await models.ask(family, 2, dp=2, ep=True))


@pytest.mark.parametrize(("family", "tp", "dp", "ep"), list(cases()))
async def test_tokens_do_not_depend_on_the_ranks(models: Models, family: str, tp: int, dp: int, ep: bool) -> None:
    tokens = await models.ask(family, tp, dp=dp, ep=ep)
    assert_greedy(models.theirs(family), tokens)
    # The number of groups does not matter either.
    assert tokens == await models.ask(family, tp)


async def equal_replays(logs: Sequence[Path]) -> int:
    """The graphs that each worker has replayed, once that is the same number.

    The cell is idle once every token is known: a rank may still compute a step that was sent ahead.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            counts = {log.read_text(encoding="utf-8").count(REPLAYED) for log in logs}
            if len(counts) == 1:
                return counts.pop()
            await asyncio.sleep(POLL_S)


@pytest.mark.slow
async def test_a_coupled_cell_runs_decode_steps_from_graphs(models: Models, tmp_path: Path) -> None:
    family = "Qwen3MoeForCausalLM"
    model_dir, ports = models.directory_of(family), [free_port() for _ in range(2)]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    flags = [f"--model-dir={model_dir}", "--ops-backend=reference", "--dp-size=2", "--ep", "--num-threads=1"]
    workers = ",".join(f"127.0.0.1:{port}" for port in ports)
    with ExitStack() as stack:
        for rank, (port, log) in enumerate(zip(ports, logs, strict=True)):
            place = [f"--listen=127.0.0.1:{port}", f"--dp-rank={rank}"]
            place += [f"--leader=127.0.0.1:{ports[0]}"] if rank else []
            stack.enter_context(start_module("tests.support.cells.capturing_worker", *flags, *place, log=log))
        cell = stack.enter_context(start_cell(model_dir, f"--workers={workers}", "--ep", *LIMITS))
        async with connect(cell) as client:
            completions = await client.generate_all(requests())
            state = await client.wait_until_idle()
        num_replays = await equal_replays(logs)
    assert all(rank.num_prefill_steps for rank in state.rank_steps)
    # Both ran each graph, and most steps were decodes that ran from one.
    assert num_replays > NUM_TOKENS / 2
    assert [completion.token_ids for completion in completions] == await models.ask(family, 1)


@pytest.mark.proof
async def test_a_rank_that_is_idle_for_long_keeps_in_step(models: Models) -> None:
    model_dir = models.directory_of("Qwen3MoeForCausalLM")
    requests = [
        token_request(prompt, max_tokens=300, ignore_eos=True) for prompt in make_prompts((20, 35, 9, 50), seed=5)
    ]
    with start_cell(model_dir, REFERENCE, "--dp=2", "--ep") as cell:
        async with connect(cell) as client:
            alone = [await client.generate(request) for request in requests]
            idle = await client.wait_until_idle()
            together = await client.generate_all(requests)
            state = await client.wait_until_idle()
    num_steps = sum(len(completion.token_ids) for completion in alone)
    assert num_steps > 1_000
    # One rank computed while the other was idle and ran a dummy in each step.
    assert sum(rank.num_dummy_steps for rank in idle.rank_steps) == num_steps
    assert [completion.token_ids for completion in alone] == [completion.token_ids for completion in together]
    assert state.num_free_blocks == state.num_blocks


@pytest.mark.proof
async def test_the_real_models_heads_are_shared_by_three(real_model: Path) -> None:
    requests = [
        token_request(prompt, max_tokens=NUM_REAL_TOKENS, num_logprobs=2)
        for prompt in make_prompts([5 + 9 * number for number in range(NUM_REAL_REQUESTS)], seed=6)
    ]
    answers = []
    for tp in (1, REAL_TP):
        with start_cell(real_model, REFERENCE, f"--tp={tp}") as cell:
            async with connect(cell) as client:
                answers.append(await client.generate_all(requests))
    for alone, shared in zip(*answers, strict=True):
        assert shared.token_ids
        for position, token, other in zip(alone.logprobs, alone.token_ids, shared.token_ids, strict=False):
            if token != other:
                best, second = (top.logprob for top in position.top)
                assert best - second < MIN_MARGIN
                # After a differing token the rest of the text differs too.
                break
