"""A launch waits for nothing that the device computes, so that a GPU never waits for the host.

The device is `meta`: its tensors have shapes but no values, so whatever reads one fails. Nor may the host wait for a
copy to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.forward.staging import PinnedStaging, Staging
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.stream import Launch
from services.worker.step import Step
from shared.limits import SamplingOptions
from tests.support.graphs import CountingCapture
from tests.support.meta_device import META, WithoutWaiting, skip_kernels
from tests.support.small_configs import SMALL_CONFIGS
from tests.support.tiny_llama import TINY_CONFIG
from tests.support.worker_steps import decode_step, make_chunk, make_enter, mixed_step, prefill_step

LLAMA = {**TINY_CONFIG, "num_hidden_layers": 2}
DEEPSEEK = {
    **SMALL_CONFIGS["DeepseekV32ForCausalLM"]["plain"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 4,
}


class UnreadStaging(PinnedStaging):
    """Staging of a device that has no values to copy back."""

    def download(self, values: Tensor) -> None:
        """See `Staging`."""
        assert values.shape == (self._num_values,)
        assert values.dtype == torch.int64


class MetaStream:
    """Launches on a device without values. See `Stream`."""

    is_async = True

    def launch(self, work: Callable[[], None]) -> Launch:
        """See `Stream`."""
        with WithoutWaiting():  # type: ignore[no-untyped-call]
            work()
        return MetaLaunch()

    def synchronize(self) -> None:
        """See `Stream`."""

    def claim_staging(self) -> Staging:
        """See `Stream`."""
        return UnreadStaging(META, is_pinned=False)

    def return_staging(self, staging: Staging) -> None:
        """See `Stream`."""


class MetaLaunch:
    """See `Launch`."""

    def wait(self) -> int:
        """See `Launch`."""
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


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_launch_reads_nothing_from_the_device(
    make_runner: Callable[[CountingCapture | None], ModelRunner], has_graphs: bool
) -> None:
    capture = RecordingCapture() if has_graphs else None
    runner = make_runner(capture)
    for step in steps():
        runner.launch(step)
    assert capture is None or sum(capture.replays) == 5


def test_a_step_that_needs_the_host_reads_from_the_device(
    make_runner: Callable[[CountingCapture | None], ModelRunner],
) -> None:
    runner = make_runner(None)
    penalized = make_enter(0, [5, 9, 2], range(4), options=SamplingOptions(presence_penalty=1.0))
    with pytest.raises((NotImplementedError, RuntimeError, AssertionError), match=r"meta|waits"):
        runner.launch(prefill_step(penalized))
