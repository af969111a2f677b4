"""Bad settings are refused at start with a message that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.config import SchedulerSettings
from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.policy import CellTopology, RetractionPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.config import load_settings
from shared.network.tls import Role
from tests.support.cells.certificates import Authority, write_files
from tests.support.cells.tls_cell import tls_flags


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kv-cache-block-size", "8"),
        ("--kv-cache-block-size", "24"),
        ("--max-num-seqs", "0"),
        ("--max-num-batched-tokens", "0"),
        ("--max-num-batched-tokens", "many"),
        ("--enable-mixed-steps", "perhaps"),
        ("--scheduler-delay-factor", "nan"),
        ("--max-unread-s", "0"),
        ("--workers", "127.0.0.1:1,nowhere"),
        ("--worker-silence-s", "0"),
        ("--listen", "0.0.0.0:1"),
    ],
)
def test_a_bad_setting_is_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        load_settings(SchedulerSettings, [flag, value])
    assert error.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [("--listen", "--insecure-bind=0.0.0.0:1"), ("--cell-listen", "--insecure-cell-bind=0.0.0.0:1")],
)
def test_a_port_that_others_may_reach_needs_tls_or_its_own_way_out(
    flag: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, [f"{flag}=0.0.0.0:1"])
    assert way_out in capsys.readouterr().err


def test_an_unencrypted_cell_port_is_refused_beside_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    flags = tls_flags(write_files(tmp_path, authority.issue_role(Role.SCHEDULER), authority))
    assert load_settings(SchedulerSettings, [*flags, "--cell-listen=0.0.0.0:1"]).cell_bind_address == "0.0.0.0:1"
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, [*flags, "--insecure-cell-bind=0.0.0.0:1"])
    assert "--insecure-cell-bind cannot be used with TLS" in capsys.readouterr().err


def test_clients_certificates_need_a_port_with_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    files = write_files(tmp_path, authority.issue_role(Role.SCHEDULER), authority)
    flag = f"--client-ca={files.authority}"
    assert load_settings(SchedulerSettings, [*tls_flags(files), flag]).client_authority == files.authority
    for others, message in (
        ([], "--client-ca needs TLS: --tls-cert, --tls-key, --tls-ca and --trust-domain"),
        ([*tls_flags(files), "--listen=unix:x"], "--client-ca cannot be used with a unix socket as --listen"),
        ([*tls_flags(files), "--client-ca=/none"], "--client-ca /none: No such file or directory"),
    ):
        with pytest.raises(SystemExit):
            load_settings(SchedulerSettings, [flag, *others])
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_token_budget_below_a_full_decode_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-num-seqs", "32", "--max-num-batched-tokens"]
    assert load_settings(SchedulerSettings, [*flags, "32"]).policy.max_num_batched_tokens == 32
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, [*flags, "31"])
    assert "--max-num-batched-tokens" in capsys.readouterr().err


def test_without_flags_the_workers_propose_the_token_budget_and_mixed_steps() -> None:
    policy = load_settings(SchedulerSettings, ["--max-num-seqs", "60000"]).policy
    assert (policy.max_num_batched_tokens, policy.enable_mixed_steps) == (None, None)
    flags = ["--max-num-seqs=60000", "--max-num-batched-tokens=auto", "--enable-mixed-steps=auto"]
    assert load_settings(SchedulerSettings, flags).policy == policy


@pytest.mark.parametrize(("value", "is_enabled"), [("true", True), ("false", False), ("on", True)])
def test_flags_override_the_workers_proposal(value: str, is_enabled: bool) -> None:
    flags = ["--max-num-batched-tokens=4096", f"--enable-mixed-steps={value}"]
    policy = load_settings(SchedulerSettings, flags).policy
    assert (policy.max_num_batched_tokens, policy.enable_mixed_steps) == (4096, is_enabled)


def test_without_chunked_prefill_the_budget_does_not_depend_on_the_workers() -> None:
    flags = ["--no-enable-chunked-prefill", "--max-num-seqs"]
    assert load_settings(SchedulerSettings, [*flags, "512"]).policy.max_num_batched_tokens == 16384
    assert load_settings(SchedulerSettings, [*flags, "20000"]).policy.max_num_batched_tokens == 20000


def test_mixed_steps_need_chunked_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, ["--enable-mixed-steps=true", "--no-enable-chunked-prefill"])
    assert "--enable-chunked-prefill" in capsys.readouterr().err


def test_workers_are_listed_by_rank_separated_by_commas() -> None:
    settings = load_settings(SchedulerSettings, ["--workers", "unix:/a,127.0.0.1:2", "--coupled"])
    assert settings.workers == ("unix:/a", "127.0.0.1:2")
    assert settings.topology == CellTopology(2, is_coupled=True)


def test_a_single_worker_is_not_coupled() -> None:
    assert load_settings(SchedulerSettings, ["--coupled"]).topology == CellTopology()


def test_two_ranks_at_one_address_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, ["--workers=unix:/a,unix:/b,unix:/a"])
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_only_block_sizes_that_kernels_support_are_accepted(block_size: int) -> None:
    settings = load_settings(SchedulerSettings, ["--kv-cache-block-size", str(block_size)])
    assert settings.cache.block_size == block_size


def test_policies_are_named_by_their_values() -> None:
    settings = SchedulerSettings(
        queue_policy="priority", admission_policy="look_ahead", retraction_policy="fewest_output_tokens"
    )
    policy = settings.policy
    assert policy.queue_policy is QueuePolicy.PRIORITY
    assert policy.admission_policy is AdmissionPolicy.LOOK_AHEAD
    assert policy.retraction_policy is RetractionPolicy.FEWEST_OUTPUT_TOKENS


CLUSTER = ("--discovery=kubernetes", "--max-dp=4", "--discovery-service=workers", "--discovery-port=grpc")


def test_workers_that_are_discovered_have_as_many_places_as_may_come(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("serving\n", encoding="utf-8")
    (tmp_path / "token").write_text("secret", encoding="utf-8")
    (tmp_path / "ca.crt").write_text("PEM", encoding="utf-8")
    settings = load_settings(SchedulerSettings, [*CLUSTER, f"--discovery-service-account={tmp_path}"])
    assert settings.topology == CellTopology(4, is_dynamic=True)
    assert (settings.namespace, settings.discovery_period) == ("serving", 30.0)
    in_zone = [*CLUSTER, f"--discovery-service-account={tmp_path}", "--discovery-zone=eu-west_1.A"]
    assert load_settings(SchedulerSettings, in_zone).topology.preferred_zone == "eu-west_1.A"
    named = load_settings(SchedulerSettings, ["--discovery=dns", "--max-dp=2", "--discovery-name=workers.x:7"])
    assert (named.topology, named.discovery_period) == (CellTopology(2, is_dynamic=True), 5.0)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--discovery=dns", "--discovery-name=w:7"], "--discovery dns needs --max-dp"),
        (["--discovery=dns", "--max-dp=2"], "--discovery dns needs --discovery-name"),
        (["--discovery=dns", "--max-dp=2", "--discovery-name=unix:/w"], "--discovery-name"),
        ([flag for flag in CLUSTER if "port" not in flag], "--discovery kubernetes needs --discovery-port"),
        ([*CLUSTER, "--coupled"], "--coupled cannot be used with --discovery kubernetes"),
        ([*CLUSTER, "--workers=unix:/w"], "--workers cannot be used with --discovery kubernetes"),
        ([*CLUSTER, "--discovery-name=w:7"], "--discovery-name cannot be used with --discovery kubernetes"),
        (["--discovery=dns", "--max-dp=2", "--discovery-name=w:7", "--discovery-zone=a"], "--discovery-zone cannot be"),
        ([*CLUSTER, "--discovery-zone="], "topology.kubernetes.io/zone"),
        ([*CLUSTER, "--discovery-zone=eu/1"], "topology.kubernetes.io/zone"),
        (["--max-dp=2"], "--max-dp cannot be used with --discovery static"),
        (["--discovery-period-s=2"], "--discovery-period-s cannot be used with --discovery static"),
        ([*CLUSTER, "--discovery-service-account=/nowhere"], "/nowhere/namespace: No such file"),
        ([*CLUSTER, "--discovery-namespace=x", "--discovery-service-account=/nowhere"], "/nowhere/token: No such file"),
        ([*CLUSTER, "--discovery-service=Workers"], "lower-case"),
        ([*CLUSTER, "--discovery-port=0"], "1 to 65535"),
        ([*CLUSTER, "--discovery-api-server=http://10.0.0.1"], "https://HOST"),
        (["--discovery=dns", "--max-dp=0", "--discovery-name=w:7"], "--max-dp"),
    ],
)
def test_a_discovery_that_cannot_work_is_refused(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(SchedulerSettings, flags)
    assert exit_info.value.code == 2
    assert problem in capsys.readouterr().err
