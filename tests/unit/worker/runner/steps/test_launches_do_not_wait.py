"""A launch waits for nothing that the device computes, so that a GPU never waits for the host.

The device is `meta`: its tensors have shapes but no values, so whatever reads one fails. Nor may the host wait for a
copy to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import Drafting
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.forward.staging import HostArrays, PinnedStaging, Staging
from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.parallel.communicator import Parallel
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.stream import EnqueuedWork
from services.worker.weights.dummy_weights import DummyWeights
from shared.errors import InternalError
from shared.request.sampling_params import SamplingOptions
from shared.step.step import Step
from tests.support.kernels.meta_device import META, WithoutWaiting, skip_kernels
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_llama import TINY_CONFIG
from tests.support.ranks.shape_communicator import ShapeCommunicator
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_steps import (
    decode_step,
    make_chunk,
    make_enter,
    mixed_step,
    prefill_step,
    with_pairs,
)

LLAMA = {**TINY_CONFIG, "num_hidden_layers": 2}
DEEPSEEK = {
    **SMALL_CONFIGS["DeepseekV32ForCausalLM"]["plain"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 4,
}
GLM = {
    **SMALL_CONFIGS["GlmMoeDsaForCausalLM"]["plain"],
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_topk": 4,
}
QWEN3_NEXT = {**SMALL_CONFIGS["Qwen3NextForCausalLM"]["plain"], "architectures": ["Qwen3NextForCausalLM"]}


class UnreadStaging(PinnedStaging):
    """Staging of a device that has no values to copy back."""

    @override
    def download(self, results: Sequence[Tensor]) -> None:
        self._unread = [np.zeros(result.shape, str(result.dtype).removeprefix("torch.")) for result in results]

    def read(self) -> list[npt.NDArray[Any]]:
        """See `Staging`: zeros."""
        return self._unread


class MetaStream:
    """Computes on a device without values. See `Stream`."""

    is_async = True
    staging = UnreadStaging

    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        """See `Stream`."""
        with WithoutWaiting():  # type: ignore[no-untyped-call]
            work()
        return MetaWork()

    def synchronize(self) -> None:
        """See `Stream`."""

    def stage(self, arrays: HostArrays) -> Staging:
        """See `Stream`."""
        staging = self.staging(META, is_pinned=False)
        staging.pack(arrays)
        return staging


class MetaWork:
    """See `EnqueuedWork`."""

    def wait(self) -> int:
        """See `EnqueuedWork`."""
        return 0


class RecordingCapture(CountingCapture):
    """A capture as a GPU makes it: what was read on the host must hold for every replay."""

    is_recorded = True


@pytest.fixture
def config() -> dict[str, Any]:
    """The model's."""
    return LLAMA


@pytest.fixture
def make_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> Callable[[CountingCapture | None], ModelRunner]:
    """Makes runners whose kernels are not run."""
    skip_kernels(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ops, options = load_ops("triton"), LoadOptions(dummy_seed=1, device=META)
    loaded = load_model(tmp_path, ops, torch.bfloat16, lambda _: None, options=options)

    def make(capture: CountingCapture | None) -> ModelRunner:
        graphs = None if capture is None else GraphSettings(capture, (1, 4, 8))
        runner = ModelRunner(loaded, ops, KvCacheSize(0, 64), execution=Execution(graphs, MetaStream()))
        runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
        return runner

    return make


def steps() -> list[Step]:
    """Prefills, chunks, decodes of changing batches, blocks that are appended, and sequences that are drawn."""
    greedy, drawn = make_enter(0, [5, 9, 2], range(4)), make_enter(1, [3], [8], temperature=0.7, seed=9)
    filtered = make_enter(2, [7] * 5, range(16, 20), num_later_tokens=3, options=SamplingOptions(min_p=0.1))
    return [
        prefill_step(greedy, drawn),
        decode_step(),
        decode_step(append=[(1, 9)]),
        mixed_step(filtered),
        mixed_step(chunks=[make_chunk(2, [1, 2, 3])]),
        decode_step(),
        decode_step(rows=[2, 0]),
        decode_step(leave=[1]),
    ]


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, GLM, QWEN3_NEXT], ids=["llama", "deepseek", "glm", "qwen3-next"])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_launch_reads_nothing_from_the_device(
    make_runner: Callable[[CountingCapture | None], ModelRunner], has_graphs: bool
) -> None:
    capture = RecordingCapture() if has_graphs else None
    runner = make_runner(capture)
    for step in steps():
        runner.launch(step)
    assert capture is None or (sum(capture.replays), sum(capture.drawings)) == (6, 5)


@pytest.mark.parametrize("config", [DEEPSEEK])
@pytest.mark.usefixtures("make_runner")
def test_a_graph_with_experts_on_other_ranks_reads_nothing_from_the_device(tmp_path: Path) -> None:
    layout, capture = RankLayout(1, 2, 1, 2, has_expert_parallel=True), RecordingCapture()
    ops, options = load_ops("triton"), LoadOptions(dummy_seed=1, device=META)
    tp, ep = ShapeCommunicator(1, 2), ShapeCommunicator(3, 4)
    loaded = load_model(
        tmp_path, ops, torch.bfloat16, lambda _: None, options=options, parallel=Parallel(layout, tp, ep)
    )
    execution = Execution(GraphSettings(capture, (1, 4, 8)), MetaStream())
    runner = ModelRunner(loaded, ops, KvCacheSize(0, 64), layout=layout, execution=execution)
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    idle = replace(decode_step(), is_dummy=True, num_tokens_across_dp=(3, 1))
    runner.launch(replace(idle, graph_batch_size=4))
    runner.launch(replace(idle, graph_batch_size=8))
    assert capture.replays == [1, 1, 0]
    assert {len(shape) for shape in ep.shapes} == {2}
    with pytest.raises(InternalError) as raised:
        runner.launch(idle)
    assert "bincount" in str(raised.value.__cause__)


class OnesStaging(UnreadStaging):
    """Staging of a device whose drafts are all wrong."""

    @override
    def read(self) -> list[npt.NDArray[Any]]:
        return [np.ones_like(result) for result in self._unread]


class OnesStream(MetaStream):
    """A device that draws token 1, once for each row."""

    staging = OnesStaging


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("drafts_by", ["mtp", "mtp, shared selection", "draft model", "draft model, states"])
@pytest.mark.usefixtures("make_runner")
def test_a_launch_with_drafts_of_a_model_reads_nothing_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts_by: str, has_graphs: bool
) -> None:
    # Dummy weights have no such layers otherwise.
    monkeypatch.setattr(DummyWeights, "__contains__", lambda _, name: name.endswith("eh_proj.weight"))
    has_mtp, has_states = drafts_by.startswith("mtp"), drafts_by.endswith("states")
    config = {"mtp": DEEPSEEK, "mtp, shared selection": GLM, "draft model, states": QWEN3_NEXT}.get(drafts_by, LLAMA)
    ops = load_ops("triton")

    def load(config: dict[str, Any]) -> LoadedModel:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        options = LoadOptions(with_mtp=has_mtp, dummy_seed=1, device=META)
        return load_model(tmp_path, ops, torch.bfloat16, lambda _: None, options=options)

    loaded = load({**config, "num_nextn_predict_layers": 1} if has_mtp else config)
    mtp, capture = loaded.model.mtp, RecordingCapture()
    proposer = DraftModelProposer(load(LLAMA).model, ops) if mtp is None else MtpProposer(mtp, ops)
    execution = Execution(GraphSettings(capture, (1, 4, 8)) if has_graphs else None, OnesStream())
    runner = ModelRunner(loaded, ops, KvCacheSize(0, 64), drafting=Drafting(proposer, 3), execution=execution)
    runner.attach(block_size=4, max_num_seqs=8, max_num_batched_tokens=256)
    scored = SamplingOptions(num_logprobs=2)
    enters = [
        make_enter(0, [5, 9, 2], range(8), options=scored),
        make_enter(1, [3], range(8, 16), temperature=0.7, seed=9),
    ]
    chunked = make_enter(2, [7] * 5, range(16, 24), num_later_tokens=3)
    launched = [
        prefill_step(*enters),
        decode_step(),
        mixed_step(chunked),
        mixed_step(chunks=[make_chunk(2, [1, 2, 3])]),
    ]
    if has_states:
        # Of a decode with drafts, which may or may not end a block, and of a chunk.
        launched[2] = with_pairs(launched[2], saves=[(1, 0), (2, 1)])
    pending = [runner.launch(step) for step in (*launched, decode_step(), decode_step(), decode_step(leave=[1]))]
    outputs = [step.finish() for step in pending]
    # That a step's drafts failed is known after those of the next step have begun.
    assert [output.num_draft_tokens > 0 for output in outputs] == [False, *[True] * 6]
    assert not has_graphs or sum(capture.replays) > 0


def test_steps_with_every_option_read_only_tokens(
    make_runner: Callable[[CountingCapture | None], ModelRunner],
) -> None:
    runner = make_runner(RecordingCapture())
    options = SamplingOptions(
        presence_penalty=1.0,
        repetition_penalty=1.3,
        logit_bias=((7, 1.0),),
        num_logprobs=3,
        num_prompt_logprobs=2,
        logprob_token_ids=(4, 5),
    )
    enters = [
        make_enter(0, [5, 9, 2], range(4), options=options, temperature=0.7),
        make_enter(1, [3], [8]),
        replace(make_enter(2, [7, 7, 7, 7], range(16, 20)), num_prompt_tokens=2),
    ]
    pending = [runner.launch(step) for step in (prefill_step(*enters), decode_step(), decode_step(rows=[1]))]
    outputs = [step.finish() for step in pending]
    assert [output.token_ids.tolist() for output in outputs] == [[0, 0, 0], [0, 0, 0], [0]]
    slot, scores = outputs[0].prompt_logprobs[0]
    assert (slot, scores.counts.tolist()) == (0, [3, 3])
    assert [output.logprobs is not None for output in outputs] == [True, True, False]


def test_a_copy_that_is_waited_for_is_found() -> None:
    with WithoutWaiting(), pytest.raises(AssertionError, match="waits"):  # type: ignore[no-untyped-call]
        torch.zeros(3).to(META)
