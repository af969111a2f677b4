"""The tokenizer's Prometheus metrics, collected only when scraped, never while streaming; named after vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.answer.request_totals import RequestTotals, finish_label
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.tracing.request_trace import SpanTotals
from shared.histogram import Histogram
from shared.network.tls import Certificates
from shared.process.metrics import make_process_registry
from shared.tenants.client_keys import ClientKeys


def make_registry(
    scheduler: SchedulerClient,
    totals: RequestTotals,
    prompts: PromptEncoder,
    certificates: Certificates | None,
    client_keys: ClientKeys | None = None,
) -> CollectorRegistry:
    """The metrics of the replica, of its certificate and its keys if it has them, and of the process."""
    return make_process_registry(ReplicaCollector(scheduler, totals, prompts), certificates, client_keys)


class ReplicaCollector(Collector):
    """Collects a replica's metrics. Counters start at 0 with the process. Labels never hold client data."""

    def __init__(self, scheduler: SchedulerClient, totals: RequestTotals, prompts: PromptEncoder) -> None:
        self._scheduler = scheduler
        self._totals = totals
        self._prompts = prompts

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from _time_metrics(self._totals)
        yield from _token_metrics(self._totals)
        yield from _outcome_metrics(self._totals)
        yield from _span_metrics(self._totals.spans)
        yield from _template_metrics(self._prompts)
        yield from self._link_metrics()
        yield from _load_metrics(self._scheduler.load)

    def _link_metrics(self) -> Iterator[Metric]:
        counters = self._scheduler.requests.counters
        yield GaugeMetricFamily(
            "lockstep_scheduler_linked", "1 if linked to a serving scheduler, otherwise 0.", self._scheduler.is_linked
        )
        yield CounterMetricFamily(
            "lockstep_scheduler_links_lost", "Links lost to a scheduler that was serving.", counters.num_lost_links
        )
        yield CounterMetricFamily(
            "lockstep_requests_resubmitted",
            "Resubmissions of requests whose scheduler was lost.",
            counters.num_resubmissions,
        )
        yield CounterMetricFamily(
            "lockstep_poison_requests",
            "Requests ended because they killed schedulers.",
            counters.num_poison_requests,
        )
        resumes = CounterMetricFamily(
            "lockstep_resumes",
            "Resumes of choices after a worker or a scheduler was lost, counted when the choice ends; exact if its "
            "bytes are those of an undisturbed run.",
            labels=["exact"],
        )
        resumes.add_metric(["true"], counters.num_exact_resumes)
        resumes.add_metric(["false"], counters.num_other_resumes)
        yield resumes


def _template_metrics(prompts: PromptEncoder) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "lockstep_chat_template_info",
        "Always 1; the label is the SHA-256 of the chat template, equal on a cell's replicas. No samples without a "
        "template.",
        labels=["digest"],
    )
    if prompts.template_digest is not None:
        info.add_metric([prompts.template_digest], 1)
    yield info
    ended = CounterMetricFamily(
        "lockstep_chat_renders_ended",
        "Renders of chats that were ended: at their limit of processor time or memory, by a crash, without an answer, "
        "or because their process was killed, after which they are tried again once.",
        labels=["cause"],
    )
    for cause, count in prompts.num_ended_renders.items():
        ended.add_metric([cause], count)
    yield ended


def _load_metrics(load: exchange_pb2.CellLoad | None) -> Iterator[Metric]:
    """What a load balancer reads of each replica, with no label in its way; no samples while the load is not known.

    Source: the model server protocol of the Gateway API Inference Extension, "Metrics Reporting".
    """
    waiting = GaugeMetricFamily(
        "lockstep_cell_num_requests_waiting",
        "Choices in the whole cell that wait for their first step, or to be prefilled again.",
    )
    running = GaugeMetricFamily("lockstep_cell_num_requests_running", "Choices in the whole cell that hold KV blocks.")
    usage = GaugeMetricFamily(
        "lockstep_cell_kv_cache_usage_perc",
        "Used KV blocks of the whole cell over all, 0 to 1; 1 while it has no workers.",
    )
    config = GaugeMetricFamily(
        "lockstep_cell_cache_config_info",
        "Always 1; the labels say how many tokens a KV block has, and how many blocks the whole cell has.",
        labels=["block_size", "num_gpu_blocks"],
    )
    if load is not None:
        waiting.add_metric([], load.num_waiting)
        running.add_metric([], load.num_running)
        # A cell without workers must not look idle.
        usage.add_metric([], load.num_used_blocks / load.num_blocks if load.num_blocks else 1.0)
        config.add_metric([str(load.block_size), str(load.num_blocks)], 1)
    yield from (waiting, running, usage, config)


def _time_metrics(totals: RequestTotals) -> Iterator[Metric]:
    yield _histogram(
        "lockstep_time_to_first_token_seconds",
        "Time from a call's arrival until a choice's first token leaves for its client.",
        totals.ttft_s,
    )
    yield _histogram(
        "lockstep_inter_token_latency_seconds",
        "Time between two responses with tokens of one choice; a response may have several tokens.",
        totals.itl_s,
    )
    yield _histogram(
        "lockstep_e2e_request_latency_seconds",
        "Time from a call's arrival until the end of a choice that finished.",
        totals.e2e_s,
    )
    yield _histogram(
        "lockstep_request_queue_time_seconds",
        "Time that a choice spent in the scheduler's queues before its first token.",
        totals.queue_s,
    )


def _token_metrics(totals: RequestTotals) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "lockstep_prompt_tokens", "Tokens of prompts whose first token has come.", totals.num_prompt_tokens
    )
    yield CounterMetricFamily(
        "lockstep_generation_tokens", "Completion tokens that left for clients.", totals.num_generation_tokens
    )
    yield _histogram(
        "lockstep_request_prompt_tokens", "Prompt tokens of each choice that finished.", totals.prompt_lengths
    )
    yield _histogram(
        "lockstep_request_generation_tokens",
        "Completion tokens of each choice that finished.",
        totals.completion_lengths,
    )


def _outcome_metrics(totals: RequestTotals) -> Iterator[Metric]:
    success = CounterMetricFamily(
        "lockstep_request_success", "Choices that finished, by their finish reason.", labels=["finished_reason"]
    )
    for reason, count in totals.num_by_finish.items():
        success.add_metric([finish_label(reason)], count)
    yield success
    failure = CounterMetricFamily(
        "lockstep_request_failure",
        "Calls of Generate and Complete, and of the HTTP API's completions, that ended with an error, by its reason; "
        "CANCELLED is the client's wish, OTHER a reason that only a scheduler of a later release gives.",
        labels=["reason"],
    )
    for name, count in totals.num_by_failure.items():
        failure.add_metric([name], count)
    yield failure


def _span_metrics(spans: SpanTotals) -> Iterator[Metric]:
    exported = CounterMetricFamily(
        "lockstep_spans",
        "Spans of traced requests: exported, or lost because the collector did not take them in time.",
        labels=["outcome"],
    )
    exported.add_metric(["exported"], spans.num_exported)
    exported.add_metric(["lost"], spans.num_lost)
    yield exported


def _histogram(name: str, documentation: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, documentation, histogram.buckets(), histogram.sum)
