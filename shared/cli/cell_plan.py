"""The processes of one cell: their flags, addresses and failure domains.

    clients --> tokenizer --cell.sock--> scheduler --worker-0.0.sock--> worker 0.0 <--leader-- worker 0.1 ...
                                                   --worker-1.0.sock--> worker 1.0 <--leader-- worker 1.1 ...

Each row of workers is one replica and one failure domain. In a coupled cell (expert parallelism over replicas), worker
1.0 also joins worker 0.0, and all workers are one failure domain.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.cli.manage_flag import number_manage_address
from shared.cli.serve_settings import ServeSettings
from shared.cores import num_usable_cores


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """How a service is started and where it answers."""

    role: str
    """Its module is `services.ROLE`."""
    flags: tuple[str, ...]
    """A failure domain's processes receive `make_start_flags` as well."""
    address: str
    """Its client port's; a worker has only a cell port."""
    domain: str
    """Its failure domain."""
    rank: str = ""
    """A worker's `DP.TP`; empty for a single worker."""
    cell_address: str | None = None
    """Its cell port's, if it has two ports."""

    @property
    def name(self) -> str:
        """Unique within the cell."""
        return f"{self.role} {self.rank}".rstrip()

    @property
    def health_address(self) -> str:
        """Where the launcher asks for its health: any port answers, and the cell's are the launcher's own sockets."""
        return self.cell_address or self.address


def plan_services(
    settings: ServeSettings, service_flags: Mapping[str, Sequence[str]], runtime_dir: Path
) -> list[ServiceCommand]:
    """A cell's commands in start order; internal addresses are sockets in `runtime_dir` unless configured."""
    shared_flags = [f"--log-level={settings.log_level}", f"--log-format={settings.log_format}"]
    if settings.reflection:
        shared_flags.append("--reflection")
    worker_flags = [*shared_flags, *service_flags.get("worker", ())]
    workers = [] if settings.workers else list(_plan_workers(settings, worker_flags, runtime_dir))
    leaders = settings.workers or [worker.address for worker in workers[:: settings.tp]]
    scheduler = settings.scheduler_listen or f"unix:{runtime_dir / 'scheduler.sock'}"
    cell = f"unix:{runtime_dir / 'cell.sock'}"
    drain = f"--drain-s={settings.drain_s:g}"
    scheduler_links = [f"--listen={scheduler}", f"--cell-listen={cell}", f"--workers={','.join(leaders)}", drain]
    if settings.is_coupled:
        scheduler_links.append("--coupled")
    tokenizer_links = [*settings.client_port_flags(), f"--scheduler={cell}", f"--model-dir={settings.model_dir}", drain]
    scheduler_flags = (*scheduler_links, *shared_flags, *service_flags.get("scheduler", ()))
    tokenizer_flags = (*tokenizer_links, *shared_flags, *service_flags.get("tokenizer", ()))
    return [
        *workers,
        ServiceCommand("scheduler", scheduler_flags, scheduler, "scheduler", cell_address=cell),
        ServiceCommand("tokenizer", tokenizer_flags, settings.bind_address, "tokenizer"),
    ]


def make_start_flags(domain: Sequence[ServiceCommand]) -> list[str]:
    """Flags by which a failure domain's processes find each other; none for a single process."""
    if len(domain) == 1:
        return []
    # A new port for each start: an exited process's port may not be free again yet.
    return [f"--rendezvous=127.0.0.1:{_free_port()}", f"--domain-start-id={uuid.uuid4().hex}"]


def _plan_workers(settings: ServeSettings, more_flags: Sequence[str], runtime_dir: Path) -> Iterator[ServiceCommand]:
    common = [f"--model-dir={settings.model_dir}", *settings.draft_flags()]
    if settings.ep:
        common.append("--ep")
    num_workers = settings.dp * settings.tp
    if num_workers == 1:
        address = f"unix:{runtime_dir / 'worker.sock'}"
        yield ServiceCommand("worker", (f"--listen={address}", *common, *more_flags), address, "worker")
        return
    if not any(flag.partition("=")[0] == "--num-threads" for flag in more_flags):
        common.append(f"--num-threads={max(1, num_usable_cores() // num_workers)}")
    for dp_rank in range(settings.dp):
        for tp_rank in range(settings.tp):
            address = _worker_address(runtime_dir, dp_rank, tp_rank)
            place = [f"--dp-rank={dp_rank}", f"--dp-size={settings.dp}"]
            place += [f"--tp-rank={tp_rank}", f"--tp-size={settings.tp}"]
            place.append(f"--device-index={dp_rank * settings.tp + tp_rank}")
            # A member joins its group's leader; the leader of a coupled group joins the first group's leader.
            if tp_rank:
                place.append(f"--leader={_worker_address(runtime_dir, dp_rank, 0)}")
            elif dp_rank and settings.is_coupled:
                place.append(f"--leader={_worker_address(runtime_dir, 0, 0)}")
            domain = "workers" if settings.is_coupled else f"worker {dp_rank}"
            rank = f"{dp_rank}.{tp_rank}"
            own_flags = number_manage_address(more_flags, dp_rank * settings.tp + tp_rank, rank)
            flags = (f"--listen={address}", *common, *place, *own_flags)
            yield ServiceCommand("worker", flags, address, domain, rank)


def _worker_address(runtime_dir: Path, dp_rank: int, tp_rank: int) -> str:
    return f"unix:{runtime_dir / f'worker-{dp_rank}.{tp_rank}.sock'}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
