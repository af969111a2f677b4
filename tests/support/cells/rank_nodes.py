"""The nodes of a failure domain: `lockstep ranks` processes, each on a loopback address of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import grpc
import psutil
import pytest

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from shared.network.rpc import Peer, make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.release import find_release
from tests.support.cells.cell import popen_lockstep
from tests.support.clients.client import Client, token_request
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import running_children
from tests.support.system.scraping import wait_for_probes

READY = {"livez": "200 ok", "startupz": "200 ok", "readyz": "200 ok"}
_POLL_S = 0.05

# Starts a process that writes its errors to this file.
Popen = Callable[[IO[str]], "subprocess.Popen[str]"]

# In a log of lines of text or of JSON.
_START_ID = re.compile(r"""the domain's start has begun(?: start_id=|", "start_id": ")(\w+)""")


class RankNode:
    """A launcher and its ranks, which a test can kill and start again.

    Attributes:
        address: Where its first rank listens.
        manage_address: The launcher's management port.
    """

    def __init__(self, address: str, manage_address: str, log_path: Path, popen: Popen) -> None:
        """Prepare; `start` starts it.

        Args:
            log_path: Where its stderr is appended.
            popen: Starts the launcher; its argument is the process's stderr.
        """
        self.address = address
        self.manage_address = manage_address
        self._log_path = log_path
        self._popen = popen
        self._launcher: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the launcher, of which nothing is running."""
        with self._log_path.open("a") as log:
            self._launcher = self._popen(log)

    def find_ranks(self) -> list[psutil.Process]:
        """The ranks that run."""
        assert self._launcher is not None
        return list(running_children(self._launcher.pid))

    def kill_rank(self, number: int = 0) -> None:
        """Kill a rank with SIGKILL."""
        self.find_ranks()[number].kill()

    def kill(self) -> None:
        """Kill the launcher with SIGKILL, and wait until its ranks have ended too."""
        assert self._launcher is not None
        ranks = self.find_ranks()
        self._launcher.kill()
        self._launcher.wait()
        _wait_until_ended(ranks)

    def kill_all(self) -> None:
        """Kill the launcher and its ranks, all at once as far as that can be."""
        assert self._launcher is not None
        ranks = self.find_ranks()
        for process in (*ranks, psutil.Process(self._launcher.pid)):
            process.kill()
        self._launcher.wait()
        _wait_until_ended(ranks)

    def stop(self) -> int:
        """Ask the launcher to end; returns its exit code."""
        assert self._launcher is not None
        self._launcher.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the launcher to end; returns its exit code."""
        assert self._launcher is not None
        return self._launcher.wait(PATIENCE_S)

    def log(self) -> str:
        """What the launcher and its ranks have written to stderr so far."""
        return self._log_path.read_text(encoding="utf-8")

    def start_ids(self) -> list[str]:
        """The ids of the domain's starts that its ranks have begun, in order; of followers none."""
        return _START_ID.findall(self.log())

    async def wait_until_ready(self, *, after: str | None = None) -> None:
        """Wait until the launcher says that all its ranks serve.

        Args:
            after: Wait first until its ranks have begun another start than this.
        """
        async with asyncio.timeout(PATIENCE_S):
            while after is not None and self.start_ids()[-1:] in ([], [after]):  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(_POLL_S)
        await wait_for_probes(self.manage_address, READY)

    def close(self) -> None:
        """Kill what is left."""
        if self._launcher is not None and self._launcher.poll() is None:
            self.kill_all()


def _wait_until_ended(processes: Sequence[psutil.Process]) -> None:
    """Wait for processes that are no children of this one; the system may leave them as zombies."""
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, "a rank outlives its launcher"
                time.sleep(_POLL_S)


def restart_launcher(node: RankNode) -> None:
    """Kill a node's launcher with SIGKILL, and start it again once its ranks have ended."""
    node.kill()
    node.start()


def restart_all(node: RankNode) -> None:
    """Kill all processes of a node with SIGKILL, and start it again."""
    node.kill_all()
    node.start()


async def damage_under_load(client: Client, nodes: Sequence[RankNode], damage: Callable[[], None]) -> str:
    """Damage a domain while its cell generates: every request gets the tokens that it gets without damage.

    Returns:
        The id of the domain's start before the damage, which is over.
    """
    requests = [token_request([3 + n, 9, 40 + n], max_tokens=100, ignore_eos=True, seed=n) for n in range(4)]
    await client.wait_until(lambda state: state.rank_steps and all(rank.is_attached for rank in state.rank_steps))
    old = nodes[0].start_ids()[-1]
    expected = await client.generate_all(requests)
    answers = [asyncio.create_task(client.generate(request)) for request in requests]
    await client.wait_until(lambda state: state.num_running == len(requests))
    # Not in a thread of its own: a process ends with the thread that started it.
    damage()
    completions = await asyncio.gather(*answers)
    await client.wait_until_idle()
    assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
    assert nodes[0].start_ids()[-1] != old
    return old


async def refusal_of(leader: str, start_id: str, *, peer: Peer | None = None) -> str | None:
    """Why the leader of a coupled domain of two DP ranks refuses DP rank 1 of this start; fails if it does not.

    Args:
        peer: The leader, if it serves with TLS.
    """
    layout = worker_pb2.RankLayout(dp_rank=1, dp_size=2, tp_size=1, has_expert_parallel=True)
    hello = worker_pb2.Hello(layout=layout, domain_start_id=start_id, release=find_release())
    async with make_channel(leader, internal=True, peer=peer) as channel:
        call = worker_pb2_grpc.GroupServiceStub(channel).Join()
        await call.write(worker_pb2.JoinRequest(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError) as error_info:
            await call.read()
    return reason_of(status_from_rpc_error(error_info.value))


@contextmanager
def run_nodes(model_dir: Path, directory: Path, num_nodes: int, *flags: str) -> Iterator[list[RankNode]]:
    """A domain's nodes, for the test to start; node I has one rank, on 127.0.0.(I + 1). Logs are in `directory`."""
    port = free_port()
    common = (str(model_dir), f"--nodes={num_nodes}", "--first-node=127.0.0.1", *flags)
    nodes = []
    for number in range(num_nodes):
        address = f"127.0.0.{number + 1}:{port}"
        flags_here = (*common, f"--insecure-bind={address}", f"--node-rank={number}")
        nodes.append(_make_node(directory, number, address, flags_here))
    with closing_nodes(nodes):
        yield nodes


@contextmanager
def run_node(model_dir: Path, directory: Path, *flags: str) -> Iterator[RankNode]:
    """A domain of one node, for the test to start; its ranks listen on sockets in `directory`."""
    address = f"unix:{directory / 'rank'}"
    node = _make_node(directory, 0, address, (str(model_dir), f"--listen={address}", *flags))
    with closing_nodes([node]):
        yield node


def _make_node(directory: Path, number: int, address: str, flags: Sequence[str]) -> RankNode:
    manage_address = f"unix:{directory / f'{number}.manage'}"

    def popen(stderr: IO[str]) -> subprocess.Popen[str]:
        command = ("ranks", *flags, f"--manage-listen={manage_address}")
        return popen_lockstep(*command, stdout=subprocess.DEVNULL, stderr=stderr)

    return RankNode(address, manage_address, directory / f"{number}.log", popen)


@contextmanager
def closing_nodes(nodes: Sequence[RankNode]) -> Iterator[None]:
    """Kill what is left of the nodes at the end."""
    try:
        yield
    finally:
        for node in nodes:
            node.close()
