"""A dummy step runs the model on one token of no sequence: it changes no KV, and no sequence's tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import BACKEND_NAMES, load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from shared.errors import StaleEpochError, StepMismatchError
from shared.step.step import Step, StepKind
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_runner import WrappedModel, generate_alone, load_exact
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, mixed_step, pack, prefill_step

PROMPT = [5, 9, 2, 44, 17]
# Plain attention with windows and sinks, experts, latent attention, an indexer's cache, and recurrent states.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV32ForCausalLM",
    "Qwen3NextForCausalLM",
)
COUPLED = RankLayout(dp_rank=1, dp_size=3, has_expert_parallel=True)

every_kind = pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DECODE])


class RecordingModel(WrappedModel):
    """Records what it computes."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.model)
        self.seen: list[tuple[list[int], list[int]]] = []

    @override
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.seen.append((token_ids.tolist(), positions.tolist()))
        return super().forward(token_ids, positions)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


def make_coupled(
    loaded: LoadedModel,
    *,
    layout: RankLayout = COUPLED,
    backend: str = "reference",
    graphs: GraphSettings | None = None,
) -> ModelRunner:
    """A rank in a new epoch. It has all experts, if the model has any, so that it needs no partner."""
    size = KvCacheSize(0, num_blocks=16)
    runner = ModelRunner(loaded, load_ops(backend), size, layout=layout, execution=Execution(graphs))
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    return runner


def planned(step: Step, num_tokens: int) -> Step:
    """The step of the rank `COUPLED`, which computes this many tokens."""
    return replace(step, num_tokens_across_dp=(7, num_tokens, 1))


def dummy_step(kind: StepKind = StepKind.DECODE, *, step_id: int = 1) -> Step:
    return planned(replace(decode_step(step_id=step_id), kind=kind, is_dummy=True), 1)


def contents(runner: ModelRunner) -> list[Tensor]:
    assert runner._epochs.kv_cache is not None
    kept = [tensor.clone() for layer in runner._epochs.kv_cache.layers for tensor in layer]
    states = runner._epochs.states
    # The last state is that of dummies.
    return kept if states is None else [*kept, *(tensor[:-1].clone() for layer in states.layers for tensor in layer)]


@every_kind
@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dummy_writes_no_kv_and_changes_no_token(
    tmp_path: Path, architecture: str, backend: str, kind: StepKind
) -> None:
    values = next(iter(SMALL_CONFIGS[architecture].values()))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    dummy = load_model(tmp_path, load_ops(backend), torch.float32, lambda _: None, options=LoadOptions(dummy_seed=1))

    def tokens(*, with_dummies: bool) -> list[list[int]]:
        runner = make_coupled(dummy, backend=backend)
        # A dummy's position 0 would be in block 0 if the dummy were a sequence.
        outputs = [runner.run_step(planned(prefill_step(make_enter(3, PROMPT, range(5))), 5))]
        for _ in range(3):
            if with_dummies:
                before = contents(runner)
                runner.run_step(dummy_step(kind))
                assert all(torch.equal(*pair) for pair in zip(before, contents(runner), strict=True))
            outputs.append(runner.run_step(planned(decode_step(), 1)))
        return [output.token_ids.tolist() for output in outputs]

    assert tokens(with_dummies=True) == tokens(with_dummies=False)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rank_that_is_not_coupled_computes_dummies_of_any_size_that_change_no_token(
    tmp_path: Path, architecture: str, backend: str
) -> None:
    values = next(iter(SMALL_CONFIGS[architecture].values()))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    dummy = load_model(tmp_path, load_ops(backend), torch.float32, lambda _: None, options=LoadOptions(dummy_seed=1))

    def tokens(*, with_dummies: bool) -> list[list[int]]:
        runner = make_coupled(dummy, backend=backend, layout=RankLayout())
        outputs = [runner.run_step(prefill_step(make_enter(3, PROMPT, range(5))))]
        for num_tokens in (1, 7, 64):
            if with_dummies:
                before = contents(runner)
                control = replace(decode_step(), is_dummy=True, kind=StepKind.PREFILL, num_dummy_tokens=num_tokens)
                assert not len(runner.run_step(control).token_ids)
                assert not len(runner.run_step(replace(decode_step(), is_dummy=True)).token_ids)
                assert all(torch.equal(*pair) for pair in zip(before, contents(runner), strict=True))
            outputs.append(runner.run_step(decode_step()))
        return [output.token_ids.tolist() for output in outputs]

    assert tokens(with_dummies=True) == tokens(with_dummies=False)


@every_kind
def test_a_dummy_runs_the_model_on_one_token_and_has_no_result(loaded: LoadedModel, kind: StepKind) -> None:
    model = RecordingModel(loaded)
    output = make_coupled(replace(loaded, model=model)).run_step(dummy_step(kind, step_id=9))
    assert model.seen == [([0], [0])]
    assert (output.step_id, output.token_ids.tolist(), output.not_finite_rows.tolist()) == (9, [], [])
    assert (output.counts, output.logprobs, output.prompt_logprobs) == (None, None, ())


def test_a_dummy_applies_its_batch_changes(loaded: LoadedModel) -> None:
    runner = make_coupled(loaded)
    first, second = make_enter(0, PROMPT, range(3)), make_enter(1, PROMPT[:4], [3])
    outputs = [
        runner.run_step(planned(prefill_step(first, second), 9)),
        runner.run_step(planned(replace(decode_step(leave=[0], append=[(1, 4)]), is_dummy=True), 1)),
        runner.run_step(planned(decode_step(), 1)),
        # The slot is free again.
        runner.run_step(planned(prefill_step(replace(first, block_bytes=pack(range(10, 13)))), 5)),
    ]
    tokens = [output.token_ids.tolist() for output in outputs]
    alone = generate_alone(loaded, PROMPT[:4], 2)
    whole = generate_alone(loaded, PROMPT, 1)
    assert tokens == [[whole[0], alone[0]], [], [alone[1]], whole]


@pytest.mark.parametrize(
    "step",
    [
        prefill_step(make_enter(1, PROMPT, range(2))),
        mixed_step(chunks=[make_chunk(0, [1])], rows=[]),
        decode_step(rows=[0]),
    ],
    ids=["enters", "chunks", "decodes"],
)
def test_a_dummy_that_computes_something_is_refused(loaded: LoadedModel, step: Step) -> None:
    runner = make_coupled(loaded)
    runner.run_step(planned(prefill_step(make_enter(0, PROMPT, range(3), num_later_tokens=1)), 5))
    with pytest.raises(StepMismatchError, match="dummy"):
        runner.run_step(planned(replace(step, is_dummy=True), 1))


@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    [(StepKind.PREFILL, 0), (StepKind.PREFILL, 65), (StepKind.DECODE, 0), (StepKind.DECODE, 2)],
)
def test_a_dummy_of_more_tokens_than_a_step_may_have_is_refused(
    loaded: LoadedModel, kind: StepKind, num_tokens: int
) -> None:
    step = replace(decode_step(), is_dummy=True, kind=kind, num_dummy_tokens=num_tokens)
    with pytest.raises(StepMismatchError, match="dummy step's number of tokens"):
        make_coupled(loaded, layout=RankLayout()).run_step(step)


@pytest.mark.parametrize(
    ("counts", "layout"),
    [
        *((counts, COUPLED) for counts in [(5, 5), (1, 5, 1, 1), (5, 4, 5), (0, 5, 1), ()]),
        ((5,), RankLayout()),
        ((5, 5), RankLayout(dp_rank=1, dp_size=2)),
        ((5,), RankLayout(has_expert_parallel=True)),
    ],
)
def test_a_step_is_refused_before_it_runs_if_the_ranks_token_counts_are_wrong(
    loaded: LoadedModel, counts: tuple[int, ...], layout: RankLayout
) -> None:
    model = RecordingModel(loaded)
    step = replace(prefill_step(make_enter(0, PROMPT, range(2))), num_tokens_across_dp=counts)
    runner = make_coupled(replace(loaded, model=model), layout=layout)
    with pytest.raises(StepMismatchError, match="num_tokens_across_dp"):
        runner.run_step(step)
    assert model.seen == []
    with pytest.raises(StaleEpochError):
        runner.run_step(dummy_step())


def test_a_coupled_rank_computes_what_the_plan_says(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    runner = make_coupled(loaded, graphs=GraphSettings(capture, (2, 8)))
    assert runner.graph_batch_sizes == (2, 8)
    outputs = [
        runner.run_step(planned(prefill_step(make_enter(0, PROMPT, range(3))), 5)),
        # The larger one is captured first. It is run although the other would do.
        runner.run_step(replace(planned(decode_step(), 1), graph_batch_size=8)),
        runner.run_step(replace(planned(decode_step(), 1), graph_batch_size=2)),
        # Without a size all ranks are eager.
        runner.run_step(planned(decode_step(), 1)),
    ]
    assert [output.token_ids.item() for output in outputs] == generate_alone(loaded, PROMPT, 4)
    assert capture.replays == [1, 1]


def test_a_dummy_of_a_graph_runs_it_and_writes_no_kv(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    runner = make_coupled(loaded, graphs=GraphSettings(capture, (4,)))
    outputs = [runner.run_step(planned(prefill_step(make_enter(0, PROMPT, range(3))), 5))]
    for _ in range(2):
        before = contents(runner)
        dummy = runner.run_step(replace(dummy_step(), graph_batch_size=4))
        assert dummy.token_ids.tolist() == []
        assert all(torch.equal(*pair) for pair in zip(before, contents(runner), strict=True))
        outputs.append(runner.run_step(replace(planned(decode_step(), 1), graph_batch_size=4)))
    assert [output.token_ids.item() for output in outputs] == generate_alone(loaded, PROMPT, 3)
    assert capture.replays == [4]


@pytest.mark.parametrize(
    ("step", "size"),
    [
        (planned(decode_step(), 1), 8),
        (planned(prefill_step(make_enter(1, PROMPT, [8, 9])), 5), 4),
        (dummy_step(StepKind.PREFILL), 4),
        (decode_step(), 4),
    ],
    ids=["not captured", "a prefill", "a dummy prefill", "not coupled"],
)
def test_a_step_that_its_graph_does_not_hold_is_refused(loaded: LoadedModel, step: Step, size: int) -> None:
    layout = COUPLED if step.num_tokens_across_dp else RankLayout()
    runner = make_coupled(loaded, layout=layout, graphs=GraphSettings(CountingCapture(), (4,)))
    prefill = prefill_step(make_enter(0, PROMPT, range(3)))
    runner.run_step(planned(prefill, 5) if layout.is_coupled else prefill)
    with pytest.raises(StepMismatchError, match="graph"):
        runner.run_step(replace(step, graph_batch_size=size))


def test_more_rows_than_the_graph_has_are_refused(loaded: LoadedModel) -> None:
    runner = make_coupled(loaded, graphs=GraphSettings(CountingCapture(), (1, 2)))
    runner.run_step(planned(prefill_step(make_enter(0, PROMPT, range(3)), make_enter(1, PROMPT, range(3, 6))), 10))
    with pytest.raises(StepMismatchError, match="does not fit its graph"):
        runner.run_step(replace(planned(decode_step(), 2), graph_batch_size=1))


def test_progress_grows_with_layers_and_steps(loaded: LoadedModel) -> None:
    assert make_coupled(loaded).progress == 0
    seen: list[int] = []

    class WatchedModel(WrappedModel):
        def compute_logits(self, hidden: Tensor) -> Tensor:
            seen.append(watched.progress)
            return super().compute_logits(hidden)

    watched = make_coupled(replace(loaded, model=WatchedModel(loaded.model)))
    watched.run_step(planned(prefill_step(make_enter(0, PROMPT, range(3))), 5))
    watched.run_step(dummy_step())
    watched.run_step(planned(decode_step(), 1))
    # Two layers per step, and the step itself once it has returned.
    assert (seen, watched.progress) == ([2, 8], 9)
