"""The settings of `lockstep ranks`, and the flags for its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.cli.launcher_settings import RANK_FLAGS, LauncherSettings, render_flags, split_flags
from services.cli.processes.rank_plan import RankDomain
from shared.config import ProcessSettings
from shared.network.addresses import check_host, is_on_every_interface, split_address
from shared.network.tls import Role
from shared.setting_types import Address, ListenAddress

_RESERVED_FLAGS = {"worker": RANK_FLAGS | {"manage-listen", "tls-cert", "tls-key", "tls-ca", "trust-domain"}}
_LAST_PORT = 65535


class RanksSettings(LauncherSettings, ProcessSettings):
    """Start one node's ranks of one failure domain, each a process that is restarted on exit.

    A failure domain is a replica of the model or, with --ep, all replicas of the cell. Ranks are numbered node by node,
    and within the domain DP rank by DP rank. --worker.X is passed to all ranks as --X; a value follows as the next
    argument or after "=". `python -m services.worker --help` lists the flags.
    """

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_RANKS_", cli_prog_name="lockstep ranks")

    role = Role.WORKER

    nodes: int = Field(default=1, ge=1, description="Nodes that the failure domain's ranks are spread over.")
    node_rank: int = Field(default=0, ge=0, description="Which of the nodes this is, from 0.")
    first_node: Annotated[str, AfterValidator(check_host)] | None = Field(
        default=None,
        description="Host of node 0, where rank 0 listens; all nodes have the same ports. Required on other nodes, and "
        "on node 0 too if it listens on every interface.",
    )
    ranks_per_node: int | None = Field(
        default=None, ge=1, description="Ranks on each node; by default the domain's, divided by --nodes."
    )
    dp_rank: int | None = Field(
        default=None, ge=0, description="Which replica this domain is, unless replicas are coupled."
    )
    listen: ListenAddress = Field(
        default="127.0.0.1:50053",
        description="Address of this node's first rank; each next one has the next port, or for unix:PATH a path of "
        "its own. HOST:PORT on loopback, or with mutual TLS any HOST:PORT.",
    )
    manage_listen: Address | None = Field(
        default=None,
        description="Address for the launcher's metrics and probes, over plain HTTP: /livez says that the launcher "
        "lives, /startupz and /readyz that all its ranks serve. Each rank serves its own on the ports that follow.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds that ranks may take to drain when asked to end; the scheduler's --drain-s says how long "
        "they do. Another signal, more than 2 s later, ends them at once.",
    )
    max_failed_starts: int = Field(
        default=5,
        ge=1,
        description="After this many starts in a row that failed before all ranks were ready, exit with the exit code "
        "of the rank that failed first.",
    )

    @model_validator(mode="after")
    def _check_nodes(self) -> RanksSettings:
        if self.node_rank >= self.nodes:
            raise ValueError(f"--node-rank {self.node_rank} must be less than --nodes {self.nodes}")
        if self.node_rank and self.first_node is None:
            raise ValueError("--first-node is required on every node except the first")
        num_ranks, ranks_per_node = self.domain.num_ranks, self.num_local_ranks
        if self.nodes * ranks_per_node != num_ranks:
            raise ValueError(f"the domain's {num_ranks} ranks do not fit {self.nodes} nodes of {ranks_per_node} ranks")
        if self.nodes > 1 and self.domain.is_coupled and ranks_per_node % self.tp:
            raise ValueError(
                f"--ranks-per-node {ranks_per_node} is no multiple of --tp: coupled groups cannot be split"
            )
        self.check_spares(ranks_per_node)
        return self

    @model_validator(mode="after")
    def _check_dp_rank(self) -> RanksSettings:
        if self.dp_rank is None:
            if self.dp > 1 and not self.ep:
                raise ValueError("--dp needs --dp-rank, or --ep")
            return self
        if self.domain.is_coupled:
            raise ValueError("--dp-rank cannot be used with --ep: the domain has all replicas")
        if self.dp_rank >= self.dp:
            raise ValueError(f"--dp-rank {self.dp_rank} must be less than --dp {self.dp}")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> RanksSettings:
        if self.bind_address.startswith("unix:") and self.nodes > 1:
            raise ValueError("a unix socket cannot be reached from other nodes")
        _check_fixed_ports(self.bind_address, self.num_local_ranks)
        if self.manage_listen is not None:
            _check_fixed_ports(self.manage_listen, self.num_local_ranks + 1)
        if self.nodes > 1 and self.listens_everywhere and self.first_node is None:
            raise ValueError("--first-node is required on the first node too if it listens on every interface")
        return self

    @property
    def domain(self) -> RankDomain:
        """The failure domain."""
        return RankDomain(self.tp, self.dp, has_expert_parallel=self.ep, dp_rank=self.dp_rank)

    @property
    def num_local_ranks(self) -> int:
        """Ranks on each node."""
        return self.ranks_per_node or max(1, self.domain.num_ranks // self.nodes)

    @property
    def listens_everywhere(self) -> bool:
        """Whether ranks listen on every interface."""
        return is_on_every_interface(self.bind_address)

    def shared_flags(self) -> list[str]:
        """The flags that every rank gets as they are."""
        flags = {
            "model-dir": self.model_dir,
            "tls-cert": self.tls_cert,
            "tls-key": self.tls_key,
            "tls-ca": self.tls_ca,
            "trust-domain": self.trust_domain,
            "log-level": self.log_level,
            "log-format": self.log_format,
        }
        return [*render_flags(flags), *(["--reflection"] if self.reflection else []), *self.model_flags()]


def _check_fixed_ports(address: str, num_ports: int) -> None:
    if not address.startswith("unix:"):
        _, first_port = split_address(address)
        if not 0 < first_port <= _LAST_PORT + 1 - num_ports:
            raise ValueError(f"{address} must be the first of {num_ports} fixed ports")


def split_worker_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the workers' flags from those of `lockstep ranks`; see `split_flags`."""
    own_args, role_to_flags = split_flags(argv, _RESERVED_FLAGS, "lockstep ranks")
    return own_args, role_to_flags["worker"]
