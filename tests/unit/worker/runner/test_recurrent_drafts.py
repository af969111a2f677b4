"""A runner's recurrent states with drafts: each is that after exactly the accepted tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.config import WorkerSettings
from services.worker.drafts.drafted_states import drafted_bytes
from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.models.planning import plan_model
from services.worker.ops import load_ops
from services.worker.parallel.communicator import Parallel
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.start.drafting import check_drafting, make_drafting
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.drafting import REQUESTS, KnowingProposer, num_accepted
from tests.support.models.parity import make_prompts
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.models.small_mtp import make_small_mtp_model
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import load_exact, make_runner
from tests.support.worker.worker_steps import decode_step, make_enter, mixed_step, prefill_step, with_pairs

PROMPTS = make_prompts((19, 11))
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = build_small_model("Qwen3NextForCausalLM", "layer-types-tied-biases")
    return load_exact(write_small_model(model, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def undrafted(loaded: LoadedModel) -> list[Answer]:
    return WorkerDriver(make_runner(loaded, num_blocks=200)).generate(REQUESTS)


@pytest.mark.parametrize(("num_draft_tokens", "share_right"), [(1, 0.7), (4, 1.0), (8, 0.8)])
def test_right_and_wrong_drafts_change_no_answer(
    loaded: LoadedModel, undrafted: list[Answer], num_draft_tokens: int, share_right: float
) -> None:
    proposer = KnowingProposer(undrafted, share_right=share_right)
    driver = WorkerDriver(
        make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, num_draft_tokens)), seed=num_draft_tokens
    )
    assert driver.generate(REQUESTS) == undrafted
    assert sum(output.num_draft_tokens for output in driver.outputs) > 30


def test_drafts_looked_up_in_the_prompt_change_no_answer(loaded: LoadedModel, undrafted: list[Answer]) -> None:
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(NgramProposer(), 4))
    assert WorkerDriver(runner, seed=3).generate(REQUESTS) == undrafted


def test_drafts_computed_by_graphs_change_no_answer(loaded: LoadedModel, undrafted: list[Answer]) -> None:
    sizes = (2, 8, 16)
    proposer, capture = KnowingProposer(undrafted, share_right=0.7), CountingCapture()
    execution = Execution(GraphSettings(capture, sizes))
    runner = make_runner(loaded, num_blocks=200, drafting=Drafting(proposer, 4), execution=execution)
    assert WorkerDriver(runner, seed=1).generate(REQUESTS) == undrafted
    # The graphs of steps with drafts were captured first.
    assert sum(capture.replays[: len(sizes)]) > 5


def test_drafts_of_a_dense_model_change_no_answer(loaded: LoadedModel, undrafted: list[Answer], tmp_path: Path) -> None:
    settings = WorkerSettings(
        model_dir=loaded.model_dir, draft_proposer="model", draft_model=write_tiny_llama(tmp_path), num_draft_tokens=3
    )
    drafting = make_drafting(settings, loaded, load_ops("reference"), lambda: None)
    driver = WorkerDriver(make_runner(loaded, num_blocks=200, drafting=drafting), seed=5)
    assert driver.generate(REQUESTS) == undrafted
    assert sum(output.num_draft_tokens for output in driver.outputs) > 30


def test_drafts_by_multi_token_prediction_change_no_answer(tmp_path: Path) -> None:
    make_small_mtp_model("Qwen3NextForCausalLM", "plain", tmp_path, has_sure_drafts=True)
    ops, options = load_ops("reference"), LoadOptions(with_mtp=True)
    loaded = load_model(tmp_path, ops, torch.float32, lambda _: None, options=options)
    requests = REQUESTS[:4]
    expected = WorkerDriver(make_runner(loaded, num_blocks=200)).generate(requests)
    settings = WorkerSettings(model_dir=tmp_path, draft_proposer="mtp", num_draft_tokens=3)
    runner = make_runner(loaded, num_blocks=200, drafting=make_drafting(settings, loaded, ops, lambda: None))
    driver = WorkerDriver(runner, seed=2)
    assert driver.generate(requests) == expected
    assert 5 < num_accepted(driver) < sum(output.num_draft_tokens for output in driver.outputs)


def states_of(runner: ModelRunner, slot: int) -> list[Tensor]:
    states = runner._epochs.states
    assert states is not None
    return [tensor[slot].clone() for layer in states.layers for tensor in layer]


def undrafted_states(runner: ModelRunner, prompt: list[int]) -> tuple[Answer, dict[int, list[Tensor]]]:
    """What follows a prompt without drafts, and the states by how many tokens they have taken in."""
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    tokens = runner.run_step(prefill_step(make_enter(1, prompt, range(16)))).token_ids.tolist()
    states = {len(prompt): states_of(runner, 1)}
    for number in range(1, NUM_TOKENS):
        tokens += runner.run_step(decode_step()).token_ids.tolist()
        states[len(prompt) + number] = states_of(runner, 1)
    return Answer(tokens), states


def assert_same(states: list[Tensor], expected: list[Tensor], *, is_exact: bool) -> None:
    for ours, theirs in zip(states, expected, strict=True):
        if is_exact:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "native", "cpu"])
def test_speculation_keeps_no_state_of_rejected_drafts(loaded: LoadedModel, backend: str) -> None:
    """Found elsewhere: tokens were drawn from a state that had taken in drafts which were rejected."""
    ops = load_ops(backend)
    ours = loaded if backend == "reference" else load_model(loaded.model_dir, ops, torch.float32, lambda _: None)

    def make(drafting: Drafting | None = None) -> ModelRunner:
        return ModelRunner(ours, ops, KvCacheSize(0, 64), drafting=drafting)

    expected = [undrafted_states(make(), prompt) for prompt in PROMPTS]
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    proposer = KnowingProposer([answer for answer, _ in expected], share_right=0.6, requests=requests, seed=4)
    runner = make(Drafting(proposer, 4))
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    slots, num_drafts, num_accepted = (2, 0), 0, 0
    enters = [
        make_enter(slot, prompt, range(16 * slot, 16 * slot + 16), max_num_tokens=len(prompt) + NUM_TOKENS)
        for slot, prompt in zip(slots, PROMPTS, strict=True)
    ]
    # The second prompt is computed beside a decode with drafts.
    steps = [prefill_step(enters[0]), decode_step(), mixed_step(enters[1]), *[decode_step()] * NUM_TOKENS]
    got: list[list[int]] = [[], []]
    num_saved = num_unsaved = 0
    for number, step in enumerate(steps):
        rows, decodes = ([0], [0, 1])[number > 1], ([], [0], [0], [0, 1])[min(number, 3)]
        checkpoints = [2 * (number % 8) + row for row in range(2)]
        held = [states_of(runner, 4 + checkpoint) for checkpoint in checkpoints]
        saves = [(slots[row], checkpoints[row]) for row in decodes]
        result = runner.run_step(with_pairs(step, saves=saves))
        token_ids = result.token_ids.tolist()
        counts = [1] * len(rows) if result.counts is None else result.counts.tolist()
        num_drafts, num_accepted = num_drafts + result.num_draft_tokens, num_accepted + result.num_accepted_tokens
        for row, count in zip(rows, counts, strict=True):
            by_length, before = expected[row][1], len(PROMPTS[row]) + len(got[row]) - 1
            got[row], token_ids = got[row] + token_ids[:count], token_ids[count:]
            now = len(PROMPTS[row]) + len(got[row]) - 1
            assert_same(states_of(runner, slots[row]), by_length[now], is_exact=ops.is_exact)
            # The state at a block's end, if one ends in this step. A row that had all its tokens is not computed.
            passed = now // 4 * 4
            is_saved = row in decodes and passed > before
            saved = states_of(runner, 4 + checkpoints[row])
            assert_same(saved, by_length[passed] if is_saved else held[row], is_exact=ops.is_exact)
            num_saved, num_unsaved = num_saved + is_saved, num_unsaved + (not is_saved)
    assert num_saved > 6 < num_unsaved
    assert 3 < num_accepted < num_drafts - 3
    assert got == [answer.tokens for answer, _ in expected]


def test_a_state_that_is_not_finite_is_reported_when_it_is_saved_beside_drafts(
    loaded: LoadedModel, undrafted: list[Answer]
) -> None:
    proposer = KnowingProposer(undrafted, share_right=1.0)
    runner = make_runner(loaded, drafting=Drafting(proposer, 3))
    runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    prompts = [REQUESTS[0].prompt[:23], REQUESTS[0].prompt]
    blocks = range(16), range(16, 32)
    runner.run_step(prefill_step(*(make_enter(*each) for each in zip((3, 1), prompts, blocks, strict=True))))
    states = runner._epochs.states
    assert states is not None
    states.layers[1][1][3, 0, 0, 0] = torch.inf
    result = runner.run_step(with_pairs(decode_step(), saves=[(1, 5), (3, 2)]))
    assert (result.num_draft_tokens > 0, result.not_finite_rows.tolist()) == (True, [0])
    # The first one passes the end of no block, or is finite; the second takes in the 24th token.
    assert result.not_finite_saves.tolist() == [1]
    assert all(each.isfinite().all() for each in states_of(runner, 1))


def test_what_keeps_drafts_from_the_states_takes_its_memory_before_keys_and_values(loaded: LoadedModel) -> None:
    spec, ops = loaded.model.state_spec, load_ops("reference")
    # Of eight rows of five tokens a step has at most 32.
    drafted = drafted_bytes(spec, num_rows=8, num_tokens=32)
    assert drafted > 8 * max(each.num_bytes for layer in spec.layers for each in layer)
    for left in (5 * spec.bytes_per_slot, 40 * spec.bytes_per_slot, 1):
        plain = ModelRunner(loaded, ops, KvCacheSize(left))
        runner = ModelRunner(loaded, ops, KvCacheSize(left + drafted), drafting=Drafting(NgramProposer(), 4))
        num_blocks = plain.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
        assert runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=32) == num_blocks
        assert (runner.room == plain.room, num_blocks > 0) == (True, left > 1)


def test_a_draft_model_with_recurrent_layers_is_refused(loaded: LoadedModel) -> None:
    directory, ops = Path(loaded.model_dir), load_ops("reference")
    settings = WorkerSettings(model_dir=directory, draft_proposer="model", draft_model=directory)
    with pytest.raises(ModelDirectoryError, match="a draft model with recurrent layers is not supported"):
        check_drafting(settings, plan_model(directory, ops, torch.float32), ops)


def test_ranks_that_share_the_heads_accept_the_same_drafts(loaded: LoadedModel) -> None:
    ops = load_ops("reference")

    def generate(parallel: Parallel) -> tuple[list[Answer], list[Answer], int]:
        ours = load_model(loaded.model_dir, ops, torch.float32, lambda _: None, parallel=parallel)
        plain = WorkerDriver(make_runner(ours, num_blocks=200)).generate(REQUESTS[:3])
        proposer = KnowingProposer([*plain, *[Answer([])] * (len(REQUESTS) - 3)], share_right=0.7)
        driver = WorkerDriver(make_runner(ours, num_blocks=200, drafting=Drafting(proposer, 4)), seed=6)
        return plain, driver.generate(REQUESTS[:3]), num_accepted(driver)

    first, second = run_ranks([RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)], generate)
    assert first == second
    plain, drafted, num_right = first
    assert plain == drafted
    assert num_right > 5
