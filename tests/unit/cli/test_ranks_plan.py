"""The processes of one node, and the flags of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.cli.processes.manage_flag import find_manage_address
from services.cli.processes.service_command import ServiceCommand
from services.cli.ranks_plan import plan_node
from services.cli.ranks_settings import RanksSettings
from services.worker.config import WorkerSettings
from shared.config import load_settings
from shared.network.tls import Role
from tests.support.cells.certificates import Authority, write_files
from tests.support.cells.tls_cell import tls_flags


def plan(*flags: str, worker_flags: Sequence[str] = ()) -> list[ServiceCommand]:
    return plan_node(load_settings(RanksSettings, ["m", *flags]), worker_flags)


def settings_of(command: ServiceCommand) -> WorkerSettings:
    """What the worker makes of its flags."""
    return load_settings(WorkerSettings, command.flags)


def places_of(commands: Sequence[ServiceCommand]) -> list[tuple[str, int, str, str | None]]:
    """Each process: its name, its GPU, where it listens and which leader it joins."""
    return [
        (command.rank, worker.device_index, worker.bind_address, worker.leader)
        for command in commands
        for worker in [settings_of(command)]
    ]


def test_a_single_rank_is_a_worker_as_any_other() -> None:
    [command] = plan("--listen=127.0.0.1:7")

    assert (command.name, command.address) == ("worker", "127.0.0.1:7")
    assert settings_of(command).layout.is_alone


def test_a_group_on_two_nodes_is_numbered_node_by_node() -> None:
    common = ("--tp=4", "--nodes=2", "--first-node=a.example", "--insecure-bind=0.0.0.0:7")

    assert places_of(plan(*common)) == [
        ("0.0", 0, "0.0.0.0:7", None),
        ("0.1", 1, "0.0.0.0:8", "127.0.0.1:7"),
    ]
    assert places_of(plan(*common, "--node-rank=1")) == [
        ("0.2", 0, "0.0.0.0:7", "a.example:7"),
        ("0.3", 1, "0.0.0.0:8", "a.example:7"),
    ]


def test_coupled_groups_on_two_nodes_follow_the_first_leader() -> None:
    common = ("--tp=2", "--dp=4", "--ep", "--nodes=2", "--first-node=[::1]", "--insecure-bind=[::2]:7")
    commands = plan(*common, "--node-rank=1")

    assert places_of(commands) == [
        ("2.0", 0, "[::2]:7", "[::1]:7"),
        ("2.1", 1, "[::2]:8", "[::2]:7"),
        ("3.0", 2, "[::2]:9", "[::1]:7"),
        ("3.1", 3, "[::2]:10", "[::2]:9"),
    ]
    assert all(settings_of(command).layout.is_coupled for command in commands)
    assert {command.domain for command in commands} == {"ranks"}


def test_sockets_have_a_path_for_each_rank() -> None:
    assert places_of(plan("--tp=2", "--listen=unix:/run/w")) == [
        ("0.0", 0, "unix:/run/w.0.0", None),
        ("0.1", 1, "unix:/run/w.0.1", "unix:/run/w.0.0"),
    ]


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [(["--dp=2", "--dp-rank=1"], ["--dp-rank=1", "--dp-size=2"] * 2), ([], ["--dp-size=1"] * 2)],
)
def test_a_replicas_place_is_passed_on_only_if_given(given: list[str], passed_on: list[str]) -> None:
    commands = plan("--tp=2", *given)

    assert [flag for command in commands for flag in command.flags if flag.startswith("--dp-")] == passed_on


@pytest.mark.parametrize(
    ("flags", "worker_flags", "host"),
    [
        (["--insecure-bind=0.0.0.0:7"], [], "127.0.0.1"),
        (["--insecure-bind=[::]:7", "--first-node=a"], [], "a"),
        (["--insecure-bind=[::]:7", "--first-node=[fd00::1]"], [], "fd00::1"),
        (["--insecure-bind=0.0.0.0:7"], ["--collective-host=b"], "b"),
        (["--insecure-bind=10.0.0.1:7", "--first-node=a"], [], "10.0.0.1"),
        (["--listen=unix:/run/w"], [], "127.0.0.1"),
    ],
)
def test_the_first_rank_has_an_address_for_collectives(flags: list[str], worker_flags: list[str], host: str) -> None:
    assert settings_of(plan("--tp=2", *flags, worker_flags=worker_flags)[0]).store_host == host


def test_the_management_ports_follow_the_launchers() -> None:
    for flags, addresses in (
        (["--tp=2"], ["10.0.0.1:101", "10.0.0.1:102"]),
        ([], ["10.0.0.1:101"]),
        (["--tp=4", "--nodes=2", "--node-rank=1", "--first-node=a"], ["10.0.0.1:101", "10.0.0.1:102"]),
    ):
        commands = plan("--manage-listen=10.0.0.1:100", *flags)
        assert [find_manage_address(command.flags) for command in commands] == addresses


def test_the_flags_of_all_ranks_reach_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    authority = Authority()
    files = write_files(tmp_path, authority.issue_role(Role.WORKER), authority)
    own = ["--listen=10.0.0.1:7", "--log-format=json", "--reflection", "--draft-model=d", *tls_flags(files)]
    for worker in map(settings_of, plan("--tp=2", *own, worker_flags=["--dtype", "float32"])):
        assert (worker.num_threads, worker.dtype, worker.log_format, worker.reflection) == (4, "float32", "json", True)
        assert (worker.draft_proposer, worker.tls_cert) == ("model", files.certificate)
