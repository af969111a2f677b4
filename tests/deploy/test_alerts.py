"""Every alert fires when it should and not otherwise, as Prometheus itself computes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.tokenizer.http.errors import http_error
from shared.errors import (
    AbortedByCallError,
    ClientTooSlowError,
    DeadlinePassedError,
    DrainingError,
    InternalError,
    ModelChangedError,
    ModelNotFoundError,
    NotReadyError,
    NumericError,
    PermissionDeniedError,
    PoisonRequestError,
    QueueFullError,
    SchedulerLostError,
    ServiceError,
    TenantLimitError,
    UnauthenticatedError,
    WorkersLostError,
)
from tests.support.system.processes import ROOT

FILES = ROOT / "deploy" / "helm" / "lockstep" / "files"
RULES = FILES / "rules.yaml"
RUNBOOK = ROOT / "deploy" / "RUNBOOK.md"
CELL = 'namespace="ns",cell="c"'
# What the runbook explains of the errors that clients of HTTP see.
ERRORS: tuple[type[ServiceError], ...] = (
    QueueFullError,
    TenantLimitError,
    WorkersLostError,
    ClientTooSlowError,
    NotReadyError,
    DrainingError,
    SchedulerLostError,
    ModelChangedError,
    AbortedByCallError,
    DeadlinePassedError,
    ModelNotFoundError,
    UnauthenticatedError,
    PermissionDeniedError,
    PoisonRequestError,
    NumericError,
    InternalError,
)
# Samples of two hours, one a minute.
STEADY = "{}x120"
# Those of one cell, and of none.
_FIRING = 'count by (alertname, namespace, cell) (ALERTS{{alertstate="firing",cell=~"|{cell}"}})'


@dataclass(frozen=True)
class Case:
    """What is scraped besides the healthy cell, and the alerts that fire at its end."""

    name: str
    series: dict[str, str]
    alerts: frozenset[str] = frozenset()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other cell: one of its alerts is for when nothing is scraped."""
        return self.series.keys() >= HEALTHY.keys()

    @property
    def labels(self) -> str:
        """The labels of its cell."""
        return CELL.replace('cell="c"', f'cell="{self.name}"')

    def labels_of(self, alert: str) -> str:
        """The labels of its cell that an alert has."""
        return "" if alert == "LockstepMetricsAbsent" else f"{self.labels},"


def steady(value: float) -> str:
    """A gauge that stays the same."""
    return f"{value}+0x120"


def rising(per_minute: float) -> str:
    """A counter."""
    return f"0+{per_minute}x120"


def late(value: str) -> str:
    """A counter that was 0 for most of the time."""
    return f"0+0x110 {value}"


def series(metric: str, role: str, pod: str, **labels: str) -> str:
    """A series of one pod."""
    rest = "".join(f',{name}="{value}"' for name, value in labels.items())
    return f'{metric}{{{CELL},role="{role}",pod="{pod}"{rest}}}'


def of_scheduler(metric: str, pod: str = "s-0", **labels: str) -> str:
    """A series of the scheduler that leads, or of another one."""
    return series(metric, "scheduler", pod, **labels)


def of_tokenizer(metric: str, **labels: str) -> str:
    """A series of the tokenizer."""
    return series(metric, "tokenizer", "t-0", **labels)


PODS = (("tokenizer", "t-0"), ("scheduler", "s-0"), ("scheduler", "s-1"), ("worker", "w-0"))

# A cell of one rank at work, with a standby scheduler, which has no worker.
HEALTHY = {
    **{series("up", role, pod): steady(1) for role, pod in PODS},
    **{series("scrape_duration_seconds", role, pod): steady(0.01) for role, pod in PODS},
    **{series("process_start_time_seconds", role, pod): steady(1) for role, pod in PODS},
    **{
        series("lockstep_tls_certificate_expiry_timestamp_seconds", role, pod): steady(30 * 86400) for role, pod in PODS
    },
    **{series("lockstep_tls_failed_reads_total", role, pod): steady(0) for role, pod in PODS},
    series("lockstep_worker_info", "worker", "w-0", dp_rank="0", tp_rank="0"): steady(1),
    of_scheduler("lockstep_worker_attached", rank="0"): steady(1),
    of_scheduler("lockstep_worker_attached", "s-1", rank="0"): steady(0),
    of_scheduler("lockstep_num_requests_waiting"): steady(0),
    of_scheduler("lockstep_num_requests_running"): steady(3),
    of_scheduler("lockstep_steps_total", rank="0", kind="decode"): rising(600),
    of_scheduler("lockstep_steps_total", "s-1", rank="0", kind="decode"): steady(0),
    of_scheduler("lockstep_lost_epochs_total"): rising(1 / 60),
    of_scheduler("lockstep_num_preemptions_total"): rising(0.1),
    of_scheduler("lockstep_kv_cache_usage_perc"): steady(0.97),
    of_scheduler("lockstep_poison_requests_total"): steady(0),
    of_scheduler("lockstep_integrity_failures_total"): steady(0),
    of_tokenizer("lockstep_scheduler_linked"): steady(1),
    of_tokenizer("lockstep_chat_template_info", digest="a"): steady(1),
    of_tokenizer("lockstep_scheduler_links_lost_total"): rising(1 / 60),
    of_tokenizer("lockstep_request_success_total", finished_reason="stop"): rising(60),
    of_tokenizer("lockstep_request_failure_total", reason="INTERNAL"): rising(0.1),
    of_tokenizer("lockstep_request_failure_total", reason="CANCELLED"): rising(60),
    of_tokenizer("lockstep_request_failure_total", reason="QUEUE_FULL"): steady(0),
    of_tokenizer("lockstep_request_failure_total", reason="INVALID_REQUEST"): rising(5),
    of_tokenizer("lockstep_request_queue_time_seconds_bucket", le="0.3"): rising(60),
    of_tokenizer("lockstep_request_queue_time_seconds_bucket", le="60.0"): rising(60),
    of_tokenizer("lockstep_request_queue_time_seconds_bucket", le="+Inf"): rising(60),
    of_tokenizer("lockstep_time_to_first_token_seconds_bucket", le="2.5"): rising(58),
    of_tokenizer("lockstep_time_to_first_token_seconds_count"): rising(60),
    of_tokenizer("lockstep_inter_token_latency_seconds_bucket", le="0.2"): rising(580),
    of_tokenizer("lockstep_inter_token_latency_seconds_count"): rising(600),
}

IDLE = {name: steady(0) for name in HEALTHY if name.startswith(("lockstep_request", "lockstep_time", "lockstep_inter"))}


def fires(alert: str, changes: dict[str, str], *others: str) -> Case:
    """A case in which an alert fires."""
    return Case(alert, changes, frozenset({alert, *others}))


CASES = (
    Case("a cell at work", {}),
    Case(
        "an idle cell",
        IDLE
        | {
            of_scheduler("lockstep_steps_total", rank="0", kind="decode"): steady(0),
            of_scheduler("lockstep_num_requests_running"): steady(0),
        },
    ),
    # Every series of every role, as it is from the first pod on: nothing answers, then nothing is linked or attached.
    Case(
        "a first install, which waits 10 minutes for images and loads for 70",
        dict.fromkeys(HEALTHY, "_x120")
        | {series("up", role, pod): "_x40 0x10 1x70" for role, pod in PODS if role != "worker"}
        | {series("up", "worker", "w-0"): "_x40 0x80"}
        | {series("process_start_time_seconds", role, pod): "_x50 1x70" for role, pod in PODS if role != "worker"}
        | {
            of_scheduler("lockstep_worker_attached", rank="0"): "_x50 0x70",
            of_scheduler("lockstep_worker_attached", "s-1", rank="0"): "_x50 0x70",
            of_scheduler("lockstep_num_requests_waiting"): "_x50 0x70",
            of_scheduler("lockstep_num_requests_running"): "_x50 0x70",
            of_tokenizer("lockstep_scheduler_linked"): "_x50 0x70",
            of_tokenizer("lockstep_chat_template_info", digest="a"): "_x50 1x70",
        },
    ),
    Case(
        "a first install, 8 minutes after its first pod",
        dict.fromkeys(HEALTHY, "_x120") | {series("up", role, pod): "_x112 0x8" for role, pod in PODS},
    ),
    Case(
        "a worker that is lost after an hour",
        {of_scheduler("lockstep_worker_attached", rank="0"): "1x60 0x60"},
        frozenset({"LockstepNoWorkerAttached", "LockstepWorkerNotAttached"}),
    ),
    Case("a process that dies", {series("up", "worker", "w-0"): "1x60 0x60"}, frozenset({"LockstepTargetDown"})),
    fires("LockstepMetricsAbsent", dict.fromkeys(HEALTHY, "_x120")),
    fires(
        "LockstepNoScheduler",
        {of_scheduler("up", "s-0"): steady(0), of_scheduler("up", "s-1"): steady(0)},
        "LockstepTargetDown",
    ),
    fires(
        "LockstepNoWorkerAttached",
        {of_scheduler("lockstep_worker_attached", rank="0"): steady(0)},
        "LockstepWorkerNotAttached",
    ),
    fires(
        "LockstepWorkerNotAttached",
        {series("lockstep_worker_info", "worker", "w-1", dp_rank="1", tp_rank="0"): steady(1)},
    ),
    fires("LockstepRankClaimedTwice", {of_scheduler("lockstep_worker_attached", "s-1", rank="0"): steady(1)}),
    fires("LockstepWorkersLostOften", {of_scheduler("lockstep_lost_epochs_total"): rising(0.2)}),
    fires("LockstepStuck", {of_scheduler("lockstep_steps_total", rank="0", kind="decode"): steady(9)}),
    fires("LockstepDiscoveryStale", {of_scheduler("lockstep_discovery_staleness_seconds"): steady(600)}),
    fires("LockstepQueueTooOld", {of_tokenizer("lockstep_request_queue_time_seconds_bucket", le="0.3"): rising(6)}),
    fires("LockstepKvCacheFull", {of_scheduler("lockstep_num_preemptions_total"): rising(6)}),
    fires("LockstepPoisonRequest", {of_scheduler("lockstep_poison_requests_total"): late("1+0x10")}),
    fires("LockstepIntegrityFailure", {of_scheduler("lockstep_integrity_failures_total"): late("1+0x10")}),
    fires("LockstepRequestsFail", {of_tokenizer("lockstep_request_failure_total", reason="INTERNAL"): rising(6)}),
    fires("LockstepQueueFull", {of_tokenizer("lockstep_request_failure_total", reason="QUEUE_FULL"): rising(30)}),
    fires(
        "LockstepRequestsRefused",
        {of_tokenizer("lockstep_request_failure_total", reason="INVALID_REQUEST"): rising(90)},
    ),
    fires(
        "LockstepFirstTokenSlow", {of_tokenizer("lockstep_time_to_first_token_seconds_bucket", le="2.5"): rising(48)}
    ),
    fires("LockstepTokensSlow", {of_tokenizer("lockstep_inter_token_latency_seconds_bucket", le="0.2"): rising(480)}),
    fires("LockstepTargetDown", {series("up", "worker", "w-0"): steady(0)}),
    fires("LockstepRestartsOften", {series("process_start_time_seconds", "worker", "w-0"): rising(1)}),
    fires("LockstepTokenizerUnlinked", {of_tokenizer("lockstep_scheduler_linked"): steady(0)}),
    fires(
        "LockstepChatTemplatesDiffer",
        {series("lockstep_chat_template_info", "tokenizer", "t-1", digest="b"): steady(1)},
    ),
    fires("LockstepSchedulerLostOften", {of_tokenizer("lockstep_scheduler_links_lost_total"): rising(0.2)}),
    fires("LockstepEventLoopSlow", {series("scrape_duration_seconds", "scheduler", "s-0"): steady(2)}),
    fires(
        "LockstepCertificateExpires",
        {of_tokenizer("lockstep_tls_certificate_expiry_timestamp_seconds"): steady(4 * 86400)},
    ),
    fires(
        "LockstepCertificateExpiresToday",
        {of_tokenizer("lockstep_tls_certificate_expiry_timestamp_seconds"): steady(43200)},
        "LockstepCertificateExpires",
    ),
    fires("LockstepCertificateUnreadable", {of_tokenizer("lockstep_tls_failed_reads_total"): late("1+0x10")}),
    fires("LockstepClientKeysUnusable", {of_tokenizer("lockstep_client_keys_stale"): steady(1)}),
)


def alerts() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Prometheus's tool; the test is skipped where it is missing."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed: `apt-get install prometheus`")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False)


def as_promtools_test(cases: Sequence[Case]) -> dict[str, Any]:
    """Cases in promtool's form, each a cell beside the others: no rule mixes cells."""
    samples = [
        {"series": name.replace(CELL, case.labels), "values": values}
        for case in cases
        for name, values in (HEALTHY | case.series).items()
    ]
    return {"interval": "1m", "input_series": samples, "promql_expr_test": list(map(_expectation, cases))}


def _expectation(case: Case) -> dict[str, Any]:
    alerts = [
        {"labels": f'{{{case.labels_of(name)}alertname="{name}"}}', "value": _count(case, name)} for name in case.alerts
    ]
    return {"expr": _FIRING.format(cell=case.name), "eval_time": "2h", "exp_samples": alerts}


def _count(case: Case, alert: str) -> int:
    """The series that fire: both schedulers are down in one case."""
    return 2 if (case.name, alert) == ("LockstepNoScheduler", "LockstepTargetDown") else 1


def test_prometheus_finds_nothing_wrong_with_the_rules() -> None:
    result = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_fires_alone_in_its_case_and_none_in_a_healthy_cell(tmp_path: Path) -> None:
    together = [case for case in CASES if not case.is_alone]
    tests = [as_promtools_test(cases) for cases in (together, *([case] for case in CASES if case.is_alone))]
    file = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.json").write_text(json.dumps(file))
    result = promtool("test", "rules", str(tmp_path / "cases.json"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case_a_severity_and_texts() -> None:
    assert {case.name for case in CASES} >= set(alerts())
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), name
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}


def test_the_runbook_has_one_section_for_each_alert() -> None:
    sections = re.findall(r"(?m)^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"))
    assert sections == list(alerts())
    links = [alert["annotations"]["runbook"] for alert in alerts().values()]
    assert links == [f"deploy/RUNBOOK.md#{name.lower()}" for name in alerts()]


def test_every_alerts_section_says_what_to_look_at_and_what_to_do() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    named = set(re.findall(r"\bLockstep[A-Z]\w+", text))
    assert named <= set(alerts())
    sections = [section for section in text.split("\n## ") if section.startswith("Lockstep")]
    assert len(sections) == len(alerts())
    for section in sections:
        assert re.findall(r"(?m)^\*\*(.+?):\*\*", section) == ["Means", "Look at", "Do"], section


def test_what_clients_see_over_http_has_the_codes_that_the_api_answers() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    section = text.partition("\n## What clients see over HTTP\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| ([0-9]{3})(?: ([^|]*))? \|", section)
    told = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    answers = [http_error(kind("why"), str) for kind in ERRORS]
    assert told == {(error.status, error.code) for error in answers} | {(403, "host_not_allowed")}
