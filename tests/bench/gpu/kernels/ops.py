"""Each kernel of the backend beside what computes the same elsewhere.

Arguments stay the same from one launch to the next, for all alike: what fits there is read from the chip's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from services.worker.device import DeviceRequest, choose_device
from services.worker.ops import load_ops
from tests.bench.gpu.cases import Case
from tests.bench.gpu.kernels.attention import attention_ops, elementwise_ops, head_ops, latent_ops
from tests.bench.gpu.kernels.products import expert_ops, product_ops, sampling_ops
from tests.bench.gpu.kernels.sizes import PUBLISHED, TINY, Ground, Launch, Op
from tests.bench.gpu.runners import Bench, without_waiting
from tests.bench.parts.report import Row, compare

KINDS: tuple[Callable[[Ground], Iterator[Op]], ...] = (
    elementwise_ops,
    head_ops,
    attention_ops,
    latent_ops,
    product_ops,
    expert_ops,
    sampling_ops,
)
# Mostly for the compiler: a kernel takes it seconds.
_CASE_S = 6.0


def cases(bench: Bench) -> Iterator[Case]:
    """A case for each kernel and yardstick."""
    backend = choose_device(DeviceRequest(bench.options.device, 0, "auto")).ops_backend
    ops = load_ops("cpu" if bench.device.type == "cpu" else backend)
    ground = Ground(ops, bench.device, TINY if bench.options.is_tiny else PUBLISHED)
    for kind in KINDS:
        for op in kind(ground):
            yield Case(op.name, _CASE_S, partial(_op_rows, bench, op))


@torch.inference_mode()
def _op_rows(bench: Bench, op: Op) -> Iterator[Row]:
    ours_us = launch_s(bench, op.launch) * 1e6
    # By itself too: a yardstick may fail.
    yield Row(op.name, ours_us, "us")
    for name, yardstick in op.yardsticks.items():
        yield compare(f"{op.name}, beside {name}", ours_us, "us", reference=launch_s(bench, yardstick) * 1e6)


def launch_s(bench: Bench, launch: Launch) -> float:
    """The device's time for a launch: the mean of many in one graph, which the host does not delay."""
    repeats = bench.options.effort.num_repeats
    if bench.device.type == "cpu":
        return bench.clock.mean_s(launch, repeats)
    launch()
    # What waits would end the capture, and after a capture that failed torch's allocator refuses the next one.
    with without_waiting(bench.device):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            launch()
    return bench.clock.median_s(graph.replay, 5) / repeats
