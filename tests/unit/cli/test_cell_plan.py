"""The processes of a cell, and the flags of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from services.cli.cell_plan import plan_services
from services.cli.processes.manage_flag import find_manage_address
from services.cli.processes.service_command import ROLES, ServiceCommand
from services.cli.processes.supervisor import FIRST_DELAY_S
from services.cli.serve import make_restart_policy
from services.cli.serve_settings import ServeSettings
from shared.backoff import Backoff
from shared.config import load_settings
from shared.network.tls import Role
from tests.support.cells.certificates import Authority, write_files
from tests.support.cells.tls_cell import tls_flags
from tests.support.clients.key_files import key_line, write_keys

RUNTIME_DIR = Path("/run/x")


def plan(*flags: str, service_flags: Mapping[str, Sequence[str]] | None = None) -> dict[str, ServiceCommand]:
    """The commands by name, in starting order."""
    settings = load_settings(ServeSettings, ["models/m", *flags])
    return {command.name: command for command in plan_services(settings, service_flags or {}, RUNTIME_DIR)}


def workers_of(commands: Mapping[str, ServiceCommand]) -> dict[str, dict[str, str]]:
    """The flags of the workers with their values, by rank."""
    return {
        command.rank: dict(flag.removeprefix("--").partition("=")[::2] for flag in command.flags)
        for command in commands.values()
        if command.role == "worker"
    }


@pytest.mark.parametrize(
    ("flags", "max_delay_s"),
    [
        ([], 10.0),
        (["--scheduler-lost-s=30"], 5.0),
        (["--scheduler-lost-s", "6", "--drain-s=5"], 1.0),
        (["--scheduler-lost-s=0"], 0.5),
    ],
)
def test_a_scheduler_is_restarted_before_the_requests_that_wait_for_it_are_lost(
    flags: list[str], max_delay_s: float
) -> None:
    settings = load_settings(ServeSettings, ["models/m"])
    policy = make_restart_policy(settings, list(plan(service_flags={"tokenizer": flags}).values()))
    assert policy.longest_s("scheduler") == max_delay_s
    assert policy.longest_s("worker 0") == settings.max_restart_delay_s


def test_seven_failed_starts_of_a_scheduler_leave_the_next_one_a_third_of_the_time() -> None:
    policy = make_restart_policy(load_settings(ServeSettings, ["models/m"]), list(plan().values()))
    delays = Backoff(FIRST_DELAY_S, policy.longest_s("scheduler"), jitter=0.0)
    assert sum(delays.next_delay_s() for _ in range(7)) <= 40.0


def test_the_environments_limit_for_a_lost_scheduler_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKENIZER_SCHEDULER_LOST_S", "9")
    policy = make_restart_policy(load_settings(ServeSettings, ["models/m"]), list(plan().values()))
    assert policy.longest_s("scheduler") == 1.5


def test_services_are_linked_by_sockets_and_the_worker_starts_first() -> None:
    commands = plan(
        "--listen=127.0.0.1:7",
        "--log-format=json",
        "--reflection",
        "--no-http",
        service_flags={"worker": ["--ops-backend", "reference"]},
    )

    shared = ("--log-level=info", "--log-format=json", "--reflection")
    worker, scheduler = "unix:/run/x/worker.sock", "unix:/run/x/scheduler.sock"
    cell = "unix:/run/x/cell.sock"
    assert [(name, command.address, command.flags) for name, command in commands.items()] == [
        ("worker", worker, (f"--listen={worker}", "--model-dir=models/m", *shared, "--ops-backend", "reference")),
        (
            "scheduler",
            scheduler,
            (f"--listen={scheduler}", f"--cell-listen={cell}", f"--workers={worker}", "--drain-s=30", *shared),
        ),
        (
            "tokenizer",
            "127.0.0.1:7",
            ("--listen=127.0.0.1:7", f"--scheduler={cell}", "--model-dir=models/m", "--drain-s=30", *shared),
        ),
    ]


def test_the_tokenizer_alone_is_told_of_generic_tools() -> None:
    flags = {name: command.flags for name, command in plan("--generic-tools").items()}
    assert [name for name, given in flags.items() if "--generic-tools" in given] == ["tokenizer"]
    assert "--generic-tools" not in plan()["tokenizer"].flags


def test_scheduler_and_tokenizer_drain_for_the_same_time() -> None:
    commands = plan("--drain-s=2.5")
    assert all("--drain-s=2.5" in commands[role].flags for role in ("scheduler", "tokenizer"))


def test_a_scheduler_with_a_public_address_keeps_the_cells_socket_private() -> None:
    commands = plan("--scheduler-listen=127.0.0.1:8")

    assert commands["scheduler"].address == "127.0.0.1:8"
    assert "--listen=127.0.0.1:8" in commands["scheduler"].flags
    assert "--cell-listen=unix:/run/x/cell.sock" in commands["scheduler"].flags
    assert "--scheduler=unix:/run/x/cell.sock" in commands["tokenizer"].flags


def test_only_the_tokenizer_is_exposed_to_other_machines() -> None:
    commands = plan("--insecure-bind=0.0.0.0:7", "--dp=2")

    assert [name for name, command in commands.items() if "--insecure-bind=0.0.0.0:7" in command.flags] == ["tokenizer"]


def test_tls_is_for_the_tokenizers_port(tmp_path: Path) -> None:
    authority = Authority()
    files = write_files(tmp_path, authority.issue_role(Role.TOKENIZER), authority)
    flags = ("--listen=0.0.0.0:7", f"--client-ca={files.authority}", *tls_flags(files))
    commands = plan(*flags, "--max-connection-age-s=60")

    given = {"--max-connection-age-s=60.0", *flags}
    assert given <= set(commands["tokenizer"].flags)
    assert not given & {*commands["worker"].flags, *commands["scheduler"].flags}


@pytest.mark.parametrize(
    ("flags", "worker_flags"),
    [
        ([], []),
        (["--draft-model=models/d"], ["--draft-proposer=model", "--draft-model=models/d"]),
        (["--draft-model=models/d", "--draft-proposer=model"], ["--draft-proposer=model", "--draft-model=models/d"]),
        (["--draft-proposer=mtp"], ["--draft-proposer=mtp"]),
    ],
)
def test_the_worker_gets_the_drafting_flags(flags: list[str], worker_flags: list[str]) -> None:
    drafting = [(c.role, flag) for c in plan(*flags).values() for flag in c.flags if flag.startswith("--draft")]

    assert drafting == [("worker", flag) for flag in worker_flags]


def test_both_client_ports_need_the_same_keys(tmp_path: Path) -> None:
    flag = f"--client-keys={write_keys(tmp_path / 'keys', key_line('one'))}"
    commands = plan(flag)
    assert {name for name, command in commands.items() if flag in command.flags} == {"scheduler", "tokenizer"}


def test_every_worker_knows_its_place_and_its_groups_leader() -> None:
    commands = plan("--tp=2", "--dp=2")

    places = {
        rank: (flags["dp-rank"], flags["dp-size"], flags["tp-rank"], flags["tp-size"], flags.get("leader"))
        for rank, flags in workers_of(commands).items()
    }
    assert places == {
        "0.0": ("0", "2", "0", "2", None),
        "0.1": ("0", "2", "1", "2", "unix:/run/x/worker-0.0.sock"),
        "1.0": ("1", "2", "0", "2", None),
        "1.1": ("1", "2", "1", "2", "unix:/run/x/worker-1.0.sock"),
    }
    assert [command.domain for command in commands.values()] == [
        *("worker 0", "worker 0", "worker 1", "worker 1"),
        *("scheduler", "tokenizer"),
    ]


def test_the_scheduler_gets_the_addresses_of_the_leaders_only() -> None:
    scheduler = plan("--tp=2", "--dp=2")["scheduler"]

    assert "--workers=unix:/run/x/worker-0.0.sock,unix:/run/x/worker-1.0.sock" in scheduler.flags
    assert "--coupled" not in scheduler.flags


def test_replicas_with_expert_parallelism_form_one_domain_that_follows_the_first_leader() -> None:
    commands = plan("--tp=2", "--dp=2", "--ep")

    workers = workers_of(commands)
    assert {rank: flags.get("leader") for rank, flags in workers.items()} == {
        "0.0": None,
        "0.1": "unix:/run/x/worker-0.0.sock",
        "1.0": "unix:/run/x/worker-0.0.sock",
        "1.1": "unix:/run/x/worker-1.0.sock",
    }
    assert all("ep" in flags for flags in workers.values())
    assert {command.domain for command in commands.values() if command.role == "worker"} == {"workers"}
    assert "--coupled" in commands["scheduler"].flags


def test_experts_split_over_one_replica_do_not_couple_the_scheduler() -> None:
    commands = plan("--tp=2", "--ep")

    assert "--coupled" not in commands["scheduler"].flags
    assert {command.domain for command in commands.values() if command.role == "worker"} == {"worker 0"}


def test_workers_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    assert {flags["num-threads"] for flags in workers_of(plan("--tp=3")).values()} == {"2"}
    assert {flags["num-threads"] for flags in workers_of(plan("--tp=4", "--dp=4")).values()} == {"1"}
    assert "num-threads" not in workers_of(plan())[""]


@pytest.mark.parametrize("given", [["--num-threads=5"], ["--num-threads", "5"]])
def test_an_explicit_number_of_threads_is_not_divided(given: list[str]) -> None:
    worker = plan("--dp=2", service_flags={"worker": given})["worker 1.0"]

    assert [flag for flag in worker.flags if flag.startswith("--num-threads")] == given[:1]


@pytest.mark.parametrize(("flags", "is_coupled"), [([], False), (["--ep"], True)])
def test_workers_started_elsewhere_are_only_linked(flags: list[str], is_coupled: bool) -> None:
    commands = plan("--workers=10.0.0.1:1,10.0.0.2:2", *flags)

    assert list(commands) == ["scheduler", "tokenizer"]
    assert "--workers=10.0.0.1:1,10.0.0.2:2" in commands["scheduler"].flags
    assert ("--coupled" in commands["scheduler"].flags) is is_coupled


@pytest.mark.parametrize(
    ("flags", "service_flags", "addresses"),
    [
        ([], ["--manage-listen=127.0.0.1:9100"], ["127.0.0.1:9100"]),
        (
            ["--dp=2", "--tp=2"],
            ["--manage-listen=0.0.0.0:9100"],
            ["0.0.0.0:9100", "0.0.0.0:9101", "0.0.0.0:9102", "0.0.0.0:9103"],
        ),
        (["--tp=2"], ["--manage-listen", "[::1]:9100", "--num-threads=1"], ["[::1]:9100", "[::1]:9101"]),
        (["--dp=2"], ["--manage-listen=unix:/run/m"], ["unix:/run/m.0.0", "unix:/run/m.1.0"]),
        (["--tp=2"], ["--manage-listen=127.0.0.1:0"], ["127.0.0.1:0", "127.0.0.1:0"]),
        # No addresses: the worker refuses them.
        (["--tp=2"], ["--manage-listen=nowhere"], ["nowhere", "nowhere"]),
        (["--tp=2"], ["--manage-listen"], [None, None]),
        (["--tp=2"], [], [None, None]),
    ],
)
def test_each_worker_has_a_management_port_of_its_own(
    flags: list[str], service_flags: list[str], addresses: list[str | None]
) -> None:
    commands = plan(*flags, service_flags={"worker": service_flags})
    workers = [command for command in commands.values() if command.role == "worker"]
    assert [find_manage_address(command.flags) for command in workers] == addresses
    assert all("--num-threads=1" in command.flags for command in workers if "--num-threads=1" in service_flags)


@pytest.mark.parametrize(
    ("flags", "passed"),
    [
        ([], "--http-listen=127.0.0.1:8000"),
        (["--http-listen=unix:x"], "--http-listen=unix:x"),
        (["--no-http", "--http-listen=[::1]:9"], "--http-listen=[::1]:9"),
        (["--insecure-http-bind=0.0.0.0:8000"], "--insecure-http-bind=0.0.0.0:8000"),
        (["--no-http"], None),
    ],
)
def test_the_tokenizer_alone_gets_one_address_of_the_http_api(flags: list[str], passed: str | None) -> None:
    given = [(name, flag) for name, command in plan(*flags).items() for flag in command.flags if "http" in flag]
    assert given == ([] if passed is None else [("tokenizer", passed)])


def test_every_address_of_a_cell_is_known_by_the_flag_that_sets_it() -> None:
    manage = {role: [f"--manage-listen=127.0.0.1:{port}"] for port, role in enumerate(ROLES, 9101)}
    flags = ("--insecure-bind=[::]:1", "--insecure-http-bind=[::]:2", "--scheduler-listen=unix:x")
    listeners = [one for command in plan(*flags, service_flags=manage).values() for one in command.listeners]
    assert {one.flag: one.address for one in listeners} == {
        "--worker.listen": "unix:/run/x/worker.sock",
        "--worker.manage-listen": "127.0.0.1:9101",
        "--scheduler-listen": "unix:x",
        "--scheduler.cell-listen": "unix:/run/x/cell.sock",
        "--scheduler.manage-listen": "127.0.0.1:9102",
        "--insecure-bind": "[::]:1",
        "--insecure-http-bind": "[::]:2",
        "--tokenizer.manage-listen": "127.0.0.1:9103",
    }
    own = load_settings(ServeSettings, ["m", *flags]).listeners
    assert [one.flag for one in own] == ["--insecure-bind", "--insecure-http-bind", "--scheduler-listen"]
