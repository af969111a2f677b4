"""A worker's Prometheus metrics, collected only when scraped, never by a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    # The management port answers before torch is imported.
    from services.worker.runner.model_runner import ModelRunner
    from services.worker.runner.step_totals import StepTotals


class WorkerCollector(Collector):
    """Collects a rank's metrics; there are none before its model is loaded."""

    def __init__(self) -> None:
        self.runner: ModelRunner | None = None

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        if self.runner is not None:
            yield _identity(self.runner)
            yield CounterMetricFamily(
                "lockstep_progress",
                "Layers and steps computed; what stays the same while a step is in flight is stuck.",
                self.runner.progress,
            )
            yield from _step_metrics(self.runner.step_totals)
            yield from _memory_metrics(self.runner)


def _identity(runner: ModelRunner) -> Metric:
    names = ["dp_rank", "tp_rank", "device", "backend"]
    metric = GaugeMetricFamily(
        "lockstep_worker_info",
        "Always 1; the labels say which rank this is. The DP rank is empty if the worker fits any.",
        labels=names,
    )
    layout = runner.layout
    dp_rank = "" if layout.fits_any_place else str(layout.dp_rank)
    metric.add_metric([dp_rank, str(layout.tp_rank), runner.device.type, runner.ops_backend], 1)
    return metric


def _step_metrics(totals: StepTotals) -> Iterator[Metric]:
    times = HistogramMetricFamily(
        "lockstep_step_device_time_seconds", "Time that the device took for a step, by kind.", labels=["kind"]
    )
    tokens = CounterMetricFamily(
        "lockstep_step_tokens", "Tokens that steps computed, of prompts and completions, by kind.", labels=["kind"]
    )
    for kind, counted in totals.by_kind.items():
        times.add_metric([kind], counted.device_s.buckets(), counted.device_s.sum)
        tokens.add_metric([kind], counted.num_tokens)
    yield times
    yield tokens


def _memory_metrics(runner: ModelRunner) -> Iterator[Metric]:
    yield GaugeMetricFamily("lockstep_kv_cache_bytes", "Memory of the KV cache's tensors.", runner.kv_cache_bytes)
    states = GaugeMetricFamily(
        "lockstep_state_cache_bytes",
        "Memory of recurrent states: live ones, with that of padding, or checkpoints; none for models without them.",
        labels=["kind"],
    )
    if runner.state_bytes_per_slot:
        states.add_metric(["live"], (runner.room.num_seqs + 1) * runner.state_bytes_per_slot)
        states.add_metric(["checkpoint"], runner.room.num_checkpoints * runner.state_bytes_per_slot)
    yield states
    memory = runner.device_memory()
    if memory is not None:
        yield GaugeMetricFamily(
            "lockstep_device_memory_allocated_bytes",
            "GPU memory in tensors: weights, KV cache and activations.",
            memory.allocated_bytes,
        )
        yield GaugeMetricFamily(
            "lockstep_device_memory_reserved_bytes",
            "GPU memory that the process holds for tensors, in use or not.",
            memory.reserved_bytes,
        )
