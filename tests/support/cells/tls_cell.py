"""A cell whose services talk over TCP with TLS: two workers of a group, a scheduler and a tokenizer.

Direct clients need certificates, and those of the tokenizer none.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from shared.network.rpc import Peer, make_channel
from shared.network.tls import Certificates, Role, TlsFiles, TrustedAuthority
from tests.support.cells.certificates import DOMAIN, Authority, write_files
from tests.support.clients.client import Client
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service
from tests.support.system.serving import wait_until_serving

TP_SIZE = 2


class TlsCell:
    """Its processes and the certificates of all roles. `start_tls_cell` makes one and ends it.

    Attributes:
        authority: Signs the certificates in use.
        client_authority: Signs those of direct clients.
        address: The address of its tokenizer service.
        http_address: Where that serves HTTP.
        scheduler_address: The address of its scheduler service for clients.
        cell_address: The address of its scheduler service for the cell.
        leader_address: The address of the group's leader.
    """

    def __init__(self, model_dir: Path, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.authority = Authority()
        self.renew(self.authority)
        self.client_authority = Authority("of clients")
        self._client = write_files(folder / "client", self.client_authority.issue(), self.client_authority)
        ports = [f"127.0.0.1:{free_port()}" for _ in range(TP_SIZE + 4)]
        self.address, self.http_address, self.scheduler_address, self.cell_address, *self._workers = ports
        self.leader_address = self._workers[0]
        for rank in range(TP_SIZE):
            self._start_worker(model_dir, rank)
        self._scheduler = self._start_scheduler()
        listen = (f"--listen={self.address}", f"--http-listen={self.http_address}")
        links = (*listen, f"--scheduler={self.cell_address}")
        self._start("tokenizer", Role.TOKENIZER, f"--model-dir={model_dir}", *links)

    def renew(self, authority: Authority, *others: Authority) -> None:
        """Replace every role's certificate by one of `authority`; it and the others are trusted."""
        self.authority = authority
        for role in Role:
            write_files(self._folder / role.value, authority.issue_role(role), authority, *others)

    def spoil(self) -> None:
        """Write garbage over every service's key, and over its certificate."""
        for role in (Role.TOKENIZER, Role.SCHEDULER, Role.WORKER):
            for path in (self.files(role).key, self.files(role).certificate):
                path.write_bytes(b"garbage")

    def files(self, role: Role) -> TlsFiles:
        """What the processes of a role are given."""
        folder = self._folder / role.value
        return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", DOMAIN)

    def restart_scheduler(self) -> None:
        """Kill the scheduler and start another one at its addresses."""
        self._scheduler.kill()
        self._scheduler.wait()
        self._scheduler = self._start_scheduler()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """Connect over new connections to the cell, once it serves."""
        authority, own = self.files(Role.OPERATOR).authority, self._client
        trusted = TrustedAuthority(authority, DOMAIN)
        client = TrustedAuthority(authority, DOMAIN, certificate=own.certificate, key=own.key)
        operator = Certificates(self.files(Role.OPERATOR), Role.OPERATOR)
        async with (
            make_channel(self.address, peer=Peer(trusted, Role.TOKENIZER)) as tokenizer,
            make_channel(self.scheduler_address, peer=Peer(client, Role.SCHEDULER)) as scheduler,
            make_channel(self.cell_address, internal=True, peer=Peer(operator, Role.SCHEDULER)) as cell,
        ):
            await wait_until_serving(tokenizer)
            yield Client(tokenizer, scheduler, cell)

    def _start_worker(self, model_dir: Path, rank: int) -> None:
        place = [f"--listen={self._workers[rank]}", f"--tp-rank={rank}", f"--tp-size={TP_SIZE}"]
        if rank:
            place.append(f"--leader={self.leader_address}")
        kernels = ("--ops-backend=native", "--num-threads=1")
        self._start("worker", Role.WORKER, f"--model-dir={model_dir}", *place, *kernels)

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        listen = (f"--listen={self.scheduler_address}", f"--cell-listen={self.cell_address}")
        links = (*listen, f"--workers={self.leader_address}", f"--client-ca={self._client.authority}")
        return self._start("scheduler", Role.SCHEDULER, *links)

    def _start(self, module: str, role: Role, *flags: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(start_service(module, *flags, *tls_flags(self.files(role))))


def tls_flags(files: TlsFiles) -> list[str]:
    """The flags that give a process its files."""
    return [
        f"--tls-cert={files.certificate}",
        f"--tls-key={files.key}",
        f"--tls-ca={files.authority}",
        f"--trust-domain={files.trust_domain}",
    ]


@contextmanager
def start_tls_cell(model_dir: Path, folder: Path) -> Iterator[TlsCell]:
    """Start a cell, without waiting until it serves, and kill it at the end; certificates are in `folder`."""
    with ExitStack() as stack:
        yield TlsCell(model_dir, folder, stack)
