"""The processes of one cell: their flags, addresses and failure domains.

    clients --> tokenizer --cell.sock--> scheduler --worker-0.0.sock--> worker 0.0 <--leader-- worker 0.1 ...
                                                   --worker-1.0.sock--> worker 1.0 <--leader-- worker 1.1 ...

Each row of workers is one replica and one failure domain. In a coupled cell (expert parallelism over replicas), worker
1.0 also joins worker 0.0, and all workers are one failure domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.cli.processes.rank_plan import RankDomain, RankNode, plan_ranks, share_cores
from services.cli.processes.service_command import ServiceCommand
from services.cli.serve_settings import ServeSettings

_SCHEDULER_FLAGS = {"--listen": "--scheduler-listen"}
_TOKENIZER_FLAGS = {flag: flag for flag in ("--listen", "--insecure-bind", "--http-listen", "--insecure-http-bind")}


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
    scheduler_links += settings.key_flags()
    if settings.is_coupled:
        scheduler_links.append("--coupled")
    tokenizer_links = [*settings.client_port_flags(), f"--scheduler={cell}", f"--model-dir={settings.model_dir}", drain]
    tokenizer_links += settings.template_flags()
    if settings.generic_tools:
        tokenizer_links.append("--generic-tools")
    scheduler_flags = (*scheduler_links, *shared_flags, *service_flags.get("scheduler", ()))
    tokenizer_flags = (*tokenizer_links, *shared_flags, *service_flags.get("tokenizer", ()))
    return [
        *workers,
        ServiceCommand(
            "scheduler", scheduler_flags, scheduler, "scheduler", cell_address=cell, flag_to_own=_SCHEDULER_FLAGS
        ),
        ServiceCommand("tokenizer", tokenizer_flags, settings.bind_address, "tokenizer", flag_to_own=_TOKENIZER_FLAGS),
    ]


def _plan_workers(settings: ServeSettings, more_flags: Sequence[str], runtime_dir: Path) -> Iterator[ServiceCommand]:
    flags = [f"--model-dir={settings.model_dir}", *settings.model_flags()]
    flags += share_cores(more_flags, settings.dp * settings.tp)
    for number in range(1 if settings.is_coupled else settings.dp):
        yield from _plan_domain(settings, number, flags, runtime_dir)


def _plan_domain(
    settings: ServeSettings, number: int, flags: Sequence[str], runtime_dir: Path
) -> Iterator[ServiceCommand]:
    dp_rank = None if settings.is_coupled else number
    domain = RankDomain(settings.tp, settings.dp, has_expert_parallel=settings.ep, dp_rank=dp_rank)

    def address_of(rank: int) -> str:
        name = domain.name_of(rank)
        return f"unix:{runtime_dir / (f'worker-{name}.sock' if name else 'worker.sock')}"

    node = RankNode(
        range(domain.num_ranks),
        address_of,
        lambda rank: f"--listen={address_of(rank)}",
        name="workers" if settings.is_coupled else f"worker {number}",
        first_device=number * settings.tp,
    )
    return plan_ranks(domain, node, flags)
