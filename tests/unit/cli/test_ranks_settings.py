"""The flags of `lockstep ranks`: which can be combined."""

from __future__ import annotations

import pytest

from services.cli.ranks_settings import RanksSettings, split_worker_flags
from shared.config import load_settings


def load(*flags: str) -> RanksSettings:
    return load_settings(RanksSettings, ["m", *flags])


NODES = ("--nodes=2", "--first-node=a")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes=2", "--node-rank=1", "--tp=2"], "--first-node is required on every node except the first"),
        (["--node-rank=1", "--first-node=a"], "--node-rank 1 must be less than --nodes 1"),
        ([*NODES, "--tp=3"], "the domain's 3 ranks do not fit 2 nodes of 1 ranks"),
        ([*NODES, "--tp=4", "--ranks-per-node=4"], "the domain's 4 ranks do not fit 2 nodes of 4 ranks"),
        # Each replica is a domain of its own.
        ([*NODES, "--dp=2"], "the domain's 1 ranks do not fit 2 nodes of 1 ranks"),
        (
            ["--nodes=4", "--first-node=a", "--tp=4", "--dp=2", "--ep"],
            "--ranks-per-node 2 is no multiple of --tp: coupled groups cannot be split",
        ),
        (["--dp=2", "--ep", "--dp-rank=1"], "--dp-rank cannot be used with --ep: the domain has all replicas"),
        (["--dp=2", "--dp-rank=2"], "--dp-rank 2 must be less than --dp 2"),
        ([*NODES, "--tp=2", "--listen=unix:x"], "a unix socket cannot be reached from other nodes"),
        (["--tp=2", "--listen=127.0.0.1:0"], "127.0.0.1:0 must be the first of 2 fixed ports"),
        (["--tp=2", "--listen=127.0.0.1:65535"], "127.0.0.1:65535 must be the first of 2 fixed ports"),
        (["--tp=2", "--manage-listen=[::]:65534"], "[::]:65534 must be the first of 3 fixed ports"),
        (["--manage-listen=:::65534"], "must be unix:PATH or HOST:PORT, with an IPv6 address in brackets"),
        (
            ["--nodes=2", "--tp=2", "--insecure-bind=0.0.0.0:7"],
            "--first-node is required on the first node too if it listens on every interface",
        ),
        (["--first-node=a:1"], "--first-node (or LOCKSTEP_RANKS_FIRST_NODE): must be a host without a port"),
        (["--listen=10.0.0.1:7"], "--listen (or LOCKSTEP_RANKS_LISTEN): without TLS only this machine may connect"),
        (["--draft-proposer=model"], "--draft-proposer model and --draft-model must be used together"),
        (["--max-failed-starts=0"], "--max-failed-starts"),
        (["--dp=2"], "--dp needs --dp-rank, or --ep"),
        (
            [*NODES, "--tp=4", "--spare-workers=3"],
            "--spare-workers 3 is more than the 2 workers that could need one",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*flags)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        ([], 1),
        (["--tp=2"], 2),
        (["--dp=4", "--dp-rank=3", "--tp=2"], 2),
        (["--dp=4", "--tp=2", "--ep"], 8),
        (["--dp=16", "--ep", *NODES], 8),
        (["--tp=16", *NODES], 8),
        (["--tp=4", "--ep", *NODES], 2),
    ],
)
def test_a_node_has_its_share_of_the_domain(flags: list[str], num_ranks: int) -> None:
    assert load(*flags).num_local_ranks == num_ranks


@pytest.mark.parametrize(
    "flag", ["--worker.listen=x", "--worker.dp-rank=1", "--worker.manage-listen", "--worker.tls-ca=x"]
)
def test_a_flag_that_the_launcher_sets_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        split_worker_flags(["m", flag])

    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {flag.partition('=')[0]} is set by lockstep ranks\n"


def test_the_workers_flags_are_passed_on_unread() -> None:
    assert split_worker_flags(["m", "--worker.a", "1", "--tp=2", "--worker.b"]) == (
        ["m", "--tp=2"],
        ["--a", "1", "--b"],
    )
