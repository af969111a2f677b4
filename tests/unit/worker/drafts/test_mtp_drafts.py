"""Drafts by MTP layers are exactly their tokens from scratch in any order of computation, and change no answer."""

from __future__ import annotations

from random import Random

import pytest
import torch

from services.worker.drafts.drafter import Drafting
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner.model_runner import ModelRunner
from tests.support.models.drafting import REQUESTS, CheckedProposer, drafts_of_mtp, num_accepted, with_mtp
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import generate_alone, load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

PROMPT = [5, 9, 2, 44, 17, 60, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


@pytest.fixture(scope="module")
def loaded(plain: LoadedModel) -> LoadedModel:
    return with_mtp(plain, 1)


@pytest.fixture(scope="module")
def undrafted(loaded: LoadedModel) -> list[Answer]:
    return WorkerDriver(make_runner(loaded, num_blocks=200)).generate(REQUESTS)


def checked(loaded: LoadedModel) -> CheckedProposer:
    """A proposer of the model's layers whose drafts must all equal the layers' own from scratch."""
    return CheckedProposer(
        make_proposer(loaded), lambda token_ids, count: drafts_of_mtp(loaded.model, token_ids, count)
    )


def make_proposer(loaded: LoadedModel) -> MtpProposer:
    assert loaded.model.mtp is not None
    return MtpProposer(loaded.model.mtp, load_ops("reference"))


def runner_drafting_by(
    loaded: LoadedModel, proposer: CheckedProposer | MtpProposer, num_draft_tokens: int = 4
) -> ModelRunner:
    return make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, num_draft_tokens))


@pytest.mark.parametrize(("num_layers", "num_draft_tokens"), [(1, 1), (1, 8), (2, 3), (3, 8)])
def test_drafts_change_no_answer(
    plain: LoadedModel, undrafted: list[Answer], num_layers: int, num_draft_tokens: int
) -> None:
    loaded = with_mtp(plain, num_layers)
    proposer = checked(loaded)
    runner = runner_drafting_by(loaded, proposer, num_draft_tokens)
    driver = WorkerDriver(runner, seed=num_draft_tokens, max_chunk=1 + 3 * num_layers)
    assert driver.generate(REQUESTS) == undrafted
    assert 10 < num_accepted(driver) < proposer.num_drafted - 10


@pytest.mark.parametrize(("seed", "max_chunk"), [(0, 1), (1, 3), (2, 40)])
def test_any_split_of_prompts_in_any_slot_leads_to_the_same_drafts(
    plain: LoadedModel, seed: int, max_chunk: int
) -> None:
    loaded, rng = with_mtp(plain, 2), Random(seed)
    # More than there are slots, so some are reused.
    requests = [Request([rng.randrange(512) for _ in range(rng.randint(1, 24))], 8) for _ in range(24)]
    alone = WorkerDriver(make_runner(loaded, num_blocks=200)).generate(requests)
    proposer = checked(loaded)
    driver = WorkerDriver(runner_drafting_by(loaded, proposer), seed=seed, max_chunk=max_chunk)
    assert driver.generate(requests) == alone
    assert proposer.num_drafted > 30


def test_a_cached_prefix_keeps_the_layers_kv(loaded: LoadedModel) -> None:
    proposer = checked(loaded)
    runner = runner_drafting_by(loaded, proposer)
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    runner.run_step(prefill_step(make_enter(1, PROMPT, [0, 1, 2], max_num_tokens=11)))
    # A sequence that leaves during its prompt must not leave its hidden state to the next one, which starts there.
    runner.run_step(prefill_step(make_enter(0, [40] * 8, range(20, 30), num_later_tokens=4)))
    assert runner._epochs.kv_cache is not None
    cached = [tensor[:2] for tensor in runner._epochs.kv_cache.layers[-1]]
    before = [blocks.clone() for blocks in cached]
    hit = make_enter(0, PROMPT[8:], [0, 1, *range(3, 10)], num_cached_tokens=8, cached_token_ids=PROMPT[:8])
    tokens = runner.run_step(prefill_step(hit, leave=[0])).token_ids.tolist()
    assert all(torch.equal(blocks, old) for blocks, old in zip(cached, before, strict=True))
    while len(tokens) < 16:
        tokens += runner.run_step(decode_step(rows=[0])).token_ids.tolist()
    assert tokens == generate_alone(loaded, PROMPT, len(tokens))
    # The text after the prefix is the same, so even the drafts equal those without a cache.
    assert proposer.num_drafted > 4


def test_non_finite_hidden_states_affect_only_drafts(loaded: LoadedModel) -> None:
    proposer = make_proposer(loaded)
    runner = runner_drafting_by(loaded, proposer)
    runner.attach(block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    tokens = runner.run_step(prefill_step(make_enter(0, PROMPT, range(20)))).token_ids.tolist()
    num_drafts = 0
    while len(tokens) < 16:
        with torch.inference_mode():
            proposer._last.fill_(torch.nan)
        output = runner.run_step(decode_step())
        tokens += output.token_ids.tolist()
        num_drafts += output.num_draft_tokens
    assert tokens == generate_alone(loaded, PROMPT, len(tokens))
    assert num_drafts > 0
