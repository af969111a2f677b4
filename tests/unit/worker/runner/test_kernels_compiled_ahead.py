"""After an epoch has begun on a GPU, no step needs a kernel that was not compiled yet.

The device is `meta`, and kernels are not run: what a launch would be compiled for is recorded in their place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from typing_extensions import override

from services.worker.forward.staging import HostArrays, PinnedStaging, Staging
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.runner.stream import HostStream
from tests.bench.gpu.configs import CONFIGS
from tests.support.kernels.meta_device import META
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

# More query heads per key/value head than most, so that few tokens have many rows; and longer contexts than splits.
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 1, "max_position_embeddings": 4096}


class UnreadStaging(PinnedStaging):
    """Staging of a device that has no values to copy back."""

    @override
    def download(self, results: Sequence[Tensor]) -> None:
        self._shapes = [tuple(result.shape) for result in results]

    def read(self) -> list[npt.NDArray[Any]]:
        """See `Staging`: zeros."""
        return [np.zeros(shape, np.int64) for shape in self._shapes]


class MetaStream(HostStream):
    """Launches on a device without values. See `Stream`."""

    is_async = True

    @override
    def stage(self, arrays: HostArrays) -> Staging:
        staging = UnreadStaging(META, is_pinned=False)
        staging.pack(arrays)
        return staging


class RecordingCapture(CountingCapture):
    """A capture as a GPU makes it: what was read on the host must hold for every replay."""

    is_recorded = True


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """What was launched so far: each kernel with its constants, and with which arguments are None."""
    seen: set[object] = set()

    def begin_launch(self: InterpretedFunction, _grid: object) -> Any:
        def launch(*args: object, **constants: object) -> None:
            seen.add((self.fn.__name__, tuple(arg is None for arg in args), tuple(sorted(constants.items()))))

        return launch

    monkeypatch.setattr(InterpretedFunction, "__getitem__", begin_launch)
    return seen


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("shape", ["tiny", "tiny-int4", "tiny-experts"])
def test_prompts_of_any_length_and_the_first_decode_need_no_other_kernel(
    variants: set[object], tmp_path: Path, shape: str, is_measured: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[shape], **GROUPED}), encoding="utf-8")
    ops = load_ops("triton")
    loaded = load_model(tmp_path, ops, torch.bfloat16, lambda _: None, options=LoadOptions(dummy_seed=1, device=META))
    memory = KvCacheSize(0, measure=_measure) if is_measured else KvCacheSize(0, 1 << 12)
    runner = ModelRunner(
        loaded, ops, memory, execution=Execution(GraphSettings(RecordingCapture(), (1, 4, 8)), MetaStream())
    )
    limits = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 3000}
    assert runner.attach(**limits)
    compiled = set(variants)
    for length in (*range(1, 40), 64, 65, 100, 200, 300, 600, 1000, 1500, 2000, 3000):
        for num_cached in (0, 1008):
            runner.attach(**limits)
            blocks = range(-(-(length + num_cached + 1) // 16))
            runner.run_step(prefill_step(make_enter(0, [5] * length, blocks, num_cached_tokens=num_cached)))
            runner.run_step(decode_step())
    assert variants - compiled == set()


def test_a_backend_of_torch_s_kernels_computes_nothing_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["tiny"]), encoding="utf-8")
    ops, options = load_ops("reference"), LoadOptions(dummy_seed=1, device=META)
    loaded = load_model(tmp_path, ops, torch.float32, lambda _: None, options=options)
    runner = ModelRunner(loaded, ops, KvCacheSize(0, 8), execution=Execution(stream=MetaStream()))
    assert runner.attach(block_size=16, max_num_seqs=8, max_num_batched_tokens=64) == 8
    assert runner.progress == 0


def _measure(run_largest_prefill: Any) -> int:
    run_largest_prefill()
    return 1 << 24
