"""Drafts by a second model are exactly its greedy tokens in any order of computation, and change no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import Drafting
from services.worker.models.loader import LoadedModel, load_model
from services.worker.models.registry import CausalLM
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from tests.support.models.drafting import REQUESTS, CheckedProposer, FewTokens, drafts_of_model, num_accepted
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import GIB, WrappedModel, generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17, 60, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))
    return replace(loaded, model=FewTokens(loaded.model))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    return FewTokens(load_exact(write_tiny_llama(tmp_path_factory.mktemp("draft"), changes=changes, seed=9)).model)


@pytest.fixture(scope="module")
def undrafted(loaded: LoadedModel) -> list[Answer]:
    return WorkerDriver(make_runner(loaded, num_blocks=200)).generate(REQUESTS)


def checked(model: CausalLM, *, limited: CausalLM | None = None) -> CheckedProposer:
    """A proposer of this draft model, or of its variant `limited`; all drafts must be the model's own from scratch."""
    proposer = DraftModelProposer(limited or model, load_ops("reference"))
    return CheckedProposer(proposer, lambda token_ids, count: drafts_of_model(model, token_ids, count))


def runner_drafting_by(loaded: LoadedModel, proposer: CheckedProposer, num_draft_tokens: int = 4) -> ModelRunner:
    return make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, num_draft_tokens))


class CountingModel(WrappedModel):
    """Counts the tokens that it computes."""

    num_computed = 0

    @override
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.num_computed += len(token_ids)
        return super().forward(token_ids, positions)


class ShortContext(WrappedModel):
    """Has a context of 20 tokens, and fails beyond it."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.context_length = 20

    @override
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        assert int(positions.max()) < self.context_length
        return super().forward(token_ids, positions)


@pytest.mark.parametrize(("num_draft_tokens", "seed"), [(1, 0), (3, 1), (8, 2), (8, 3)])
def test_another_model_changes_no_answer(
    loaded: LoadedModel, draft: CausalLM, undrafted: list[Answer], num_draft_tokens: int, seed: int
) -> None:
    proposer = checked(draft)
    driver = WorkerDriver(runner_drafting_by(loaded, proposer, num_draft_tokens), seed=seed, max_chunk=2 + 5 * seed)
    assert driver.generate(REQUESTS) == undrafted
    assert 10 < num_accepted(driver) < proposer.num_drafted - 10


def test_the_same_model_is_always_right(loaded: LoadedModel) -> None:
    requests = [Request(PROMPT[:length], 40) for length in (1, 4, 10)]
    alone = WorkerDriver(make_runner(loaded, num_blocks=200)).generate(requests)
    counting = CountingModel(loaded.model)
    proposer = checked(loaded.model, limited=counting)
    driver = WorkerDriver(runner_drafting_by(loaded, proposer), max_chunk=1000)
    assert driver.generate(requests) == alone
    # 39 tokens after the prompt's own: 2 drafts and one more, 4 and one more seven times, and the last one.
    assert num_accepted(driver) == proposer.num_drafted == 3 * (2 + 7 * 4)
    # Each token was computed once, except the last three, after which nothing was drafted.
    assert counting.num_computed == sum(len(request.prompt) + 40 - 3 for request in requests)


def test_drafts_by_the_cpu_backend_are_right_too(tmp_path: Path) -> None:
    ops = load_ops("cpu")
    loaded = load_model(write_tiny_llama(tmp_path), ops, torch.float32, lambda _: None)
    drafting = Drafting(DraftModelProposer(loaded.model, ops), 4)
    size = KvCacheSize(0, 200)
    requests = [Request(PROMPT[:length], 30) for length in range(1, 11)]
    alone = WorkerDriver(ModelRunner(loaded, ops, size)).generate(requests)
    driver = WorkerDriver(ModelRunner(loaded, ops, size, drafting=drafting))
    assert driver.generate(requests) == alone
    assert num_accepted(driver) > 10 * 15


def test_drafts_stop_at_the_end_of_the_draft_models_context(loaded: LoadedModel) -> None:
    requests = [Request(PROMPT, 30), Request(PROMPT * 3, 8), Request(PROMPT * 2, 5), Request([*PROMPT, *PROMPT[:9]], 5)]
    alone = WorkerDriver(make_runner(loaded, num_blocks=200)).generate(requests)
    proposer = checked(loaded.model, limited=ShortContext(loaded.model))
    driver = WorkerDriver(runner_drafting_by(loaded, proposer, 8), max_chunk=7)
    assert driver.generate(requests) == alone
    # The last possible draft is made after 20 tokens: 2, 4 and 2 for the first, one for the last.
    assert num_accepted(driver) == proposer.num_drafted == 9


class SmallSteps(WrappedModel):
    """Fails when it has to compute more than three tokens at once."""

    @override
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        assert len(token_ids) <= 3
        return super().forward(token_ids, positions)


def test_a_sequence_with_a_backlog_drafts_some_steps_later(loaded: LoadedModel) -> None:
    proposer = checked(loaded.model, limited=SmallSteps(loaded.model))
    runner = runner_drafting_by(loaded, proposer)
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=3)
    for slot in range(2):
        enter = make_enter(slot, PROMPT[slot : slot + 3], range(20 * slot, 20 * slot + 20), max_num_tokens=60)
        runner.run_step(prefill_step(enter))
    for _ in range(8):
        # A step has room for one draft, which the first row takes.
        output = runner.run_step(decode_step())
        assert output.counts is not None
        assert output.counts.tolist() == [2, 1]
    alone = [runner.run_step(decode_step(leave=[0] if first else [])) for first in (True, *[False] * 7)]
    num_drafts = [output.num_draft_tokens for output in alone]
    # It has 9 tokens to compute, then 7, 5 and 3.
    assert num_drafts[:4] == [0, 0, 0, 2]
    text = generate_alone(loaded, PROMPT[1:4], 30)
    tokens = [token for output in alone for token in output.token_ids.tolist()]
    assert tokens == text[9 : 9 + len(tokens)]


def test_a_cached_prefix_includes_the_draft_models_kv(loaded: LoadedModel, draft: CausalLM) -> None:
    proposer = checked(draft)
    runner = runner_drafting_by(loaded, proposer)
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    runner.run_step(prefill_step(make_enter(0, PROMPT, [3, 4, 5], max_num_tokens=11)))
    hit = make_enter(1, [50, 51], [3, 4, *range(6, 12)], num_cached_tokens=8, cached_token_ids=PROMPT[:8])
    tokens = runner.run_step(prefill_step(hit, leave=[0])).token_ids.tolist()
    while len(tokens) < 10:
        tokens += runner.run_step(decode_step()).token_ids.tolist()
    assert tokens == generate_alone(loaded, [*PROMPT[:8], 50, 51], len(tokens))
    assert proposer.num_drafted > 2


def test_kv_missing_from_the_draft_model_affects_only_drafts(loaded: LoadedModel, draft: CausalLM) -> None:
    # The draft model never computed the first block's KV: it is not finite.
    proposer = DraftModelProposer(draft, load_ops("reference"))
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4))
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    runner.run_step(prefill_step(make_enter(0, PROMPT, [3, 4, 5], max_num_tokens=11)))
    cache = proposer._kv_cache
    assert cache is not None
    for tensor in cache.layers[0]:
        tensor[3] = torch.nan
    hit = make_enter(1, [50, 51], [3, 4, *range(6, 12)], num_cached_tokens=8, cached_token_ids=PROMPT[:8])
    tokens = runner.run_step(prefill_step(hit, leave=[0])).token_ids.tolist()
    num_drafts = 0
    while len(tokens) < 10:
        output = runner.run_step(decode_step())
        tokens += output.token_ids.tolist()
        num_drafts += output.num_draft_tokens
    assert tokens == generate_alone(loaded, [*PROMPT[:8], 50, 51], len(tokens))
    assert num_drafts > 0


def test_both_caches_share_the_memory(loaded: LoadedModel, draft: CausalLM) -> None:
    drafting = Drafting(DraftModelProposer(draft, load_ops("reference")), 4)
    limits = {"block_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    # Two layers with two heads of 16, and one layer with one; keys and values of four bytes.
    with_drafts = make_runner(loaded, num_blocks=None, drafting=drafting).attach(**limits)
    assert with_drafts == GIB // (16 * 4 * 2 * 16 * (2 * 2 + 1))
    assert make_runner(loaded, num_blocks=None).attach(**limits) == GIB // (16 * 4 * 2 * 16 * 2 * 2)


def test_a_new_epoch_keeps_the_cache_and_forgets_the_sequences(loaded: LoadedModel, draft: CausalLM) -> None:
    proposer = checked(draft)
    runner = runner_drafting_by(loaded, proposer)
    answers = [WorkerDriver(runner, seed=seed).generate(REQUESTS[:3]) for seed in range(2)]
    assert answers[0] == answers[1]
