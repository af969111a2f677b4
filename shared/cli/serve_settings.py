"""The settings of `lockstep serve`, and the flags for the services."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from shared.cli.request_flags import DEFAULT_TARGET
from shared.config import Addresses, ClientPortSettings, DraftProposerName, ListenAddress, LocalAddress
from shared.rpc import Peer, make_peer
from shared.tls import Role

# In start order; they stop in reverse order, so that no service loses one it depends on.
ROLES = ("worker", "scheduler", "tokenizer")

_OWN_FLAGS = frozenset(
    (
        *("listen", "insecure-bind", "cell-listen", "insecure-cell-bind"),
        *("model-dir", "scheduler", "workers", "coupled", "ep", "no-ep"),
        *(
            "drain-s",
            "dp-rank",
            "dp-size",
            "tp-rank",
            "tp-size",
            "device-index",
            "leader",
            "rendezvous",
            "domain-start-id",
        ),
    )
)
# The launcher's own settings of these names are the tokenizer's.
_TOKENIZER_FLAGS = frozenset(("tls-cert", "tls-key", "tls-ca", "trust-domain", "max-connection-age-s"))


class ServeSettings(ClientPortSettings):
    """Start one cell on this machine: workers, a scheduler and a tokenizer, each a process that is restarted on exit.

    --worker.X, --scheduler.X and --tokenizer.X are passed to that service as --X; a value follows as the next argument
    or after "=". `python -m services.worker --help` lists a service's flags. The services talk over unix sockets, so
    TLS is for --listen, with a certificate of the role tokenizer.
    """

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SERVE_", cli_prog_name="lockstep serve")

    role = Role.TOKENIZER

    model_dir: CliPositionalArg[Path] = Field(description="Model directory, in Hugging Face's layout.")
    tp: int = Field(default=1, ge=1, description="Workers per model replica (tensor parallelism).")
    dp: int = Field(default=1, ge=1, description="Model replicas (data parallelism), each of --tp workers.")
    ep: bool = Field(
        default=False,
        description="Split the experts over all workers (expert parallelism). With several replicas, all workers then "
        "step in lockstep and are one failure domain.",
    )
    workers: Addresses = Field(
        default=(),
        description="Use workers that are already running instead of starting them: the address of each replica's "
        "first worker, by DP rank, separated by commas.",
    )
    listen: ListenAddress = Field(
        default=DEFAULT_TARGET,
        description="Address for clients: unix:PATH, HOST:PORT on loopback, or with TLS any HOST:PORT.",
    )
    scheduler_listen: LocalAddress | None = Field(
        default=None,
        description="Scheduler address for clients that send token ids, HOST:PORT on loopback or unix:PATH; private if "
        "not set.",
    )
    draft_proposer: DraftProposerName | None = Field(
        default=None, description="How draft tokens are proposed; if not set, model with --draft-model, else none."
    )
    draft_model: Path | None = Field(
        default=None, description="Directory of a second, smaller model with the same tokenizer, which drafts tokens."
    )
    drain_s: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds that answers in flight may take to finish once the cell, or one of its processes, is "
        "asked to end. A second signal ends the cell at once; an idle one ends at once anyway.",
    )
    health_kill_s: float = Field(
        default=30.0,
        ge=1.0,
        allow_inf_nan=False,
        description="Kill and restart a process that has not answered its health check for this many seconds.",
    )
    max_restart_delay_s: float = Field(
        default=30.0,
        ge=0.5,
        allow_inf_nan=False,
        description="The longest restart delay, in seconds. A process that exits before it is ready is restarted after "
        "0.5 s, and the delay doubles each time up to this limit. One that was ready is restarted at once, or after "
        "5 s from the fourth restart within a minute on.",
    )
    # Excluded from the logged settings: prompt text is never logged.
    prompt: str | None = Field(
        default=None, exclude=True, description="Once ready, send this prompt and stream the answer to stdout."
    )
    exit_after_prompt: bool = Field(default=False, description="Stop once the prompt has been answered.")

    @model_validator(mode="after")
    def _check_prompt(self) -> ServeSettings:
        if self.exit_after_prompt and self.prompt is None:
            raise ValueError("--exit-after-prompt needs --prompt")
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> ServeSettings:
        if self.scheduler_listen == self.bind_address:
            raise ValueError("--scheduler-listen is the tokenizer's address: each service needs its own")
        for address in (self.bind_address, self.scheduler_listen):
            if address and not address.startswith("unix:") and int(address.rpartition(":")[2]) == 0:
                raise ValueError(f"{address} has no fixed port: the launcher needs one for its health checks")
        return self

    @model_validator(mode="after")
    def _check_draft_model(self) -> ServeSettings:
        if self.draft_proposer is not None and (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model must be used together")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> ServeSettings:
        if not self.workers:
            return self
        if "tp" in self.model_fields_set:
            raise ValueError("--tp cannot be used with --workers, which are started elsewhere")
        if "dp" in self.model_fields_set and self.dp != len(self.workers):
            raise ValueError(f"--dp {self.dp} does not match the {len(self.workers)} --workers")
        if self.draft_flags():
            raise ValueError("--draft-proposer and --draft-model cannot be used with --workers, started elsewhere")
        return self

    @property
    def tokenizer_peer(self) -> Peer | None:
        """For channels to the tokenizer."""
        return make_peer(self.certificates, Role.TOKENIZER)

    @property
    def model_name(self) -> str:
        """The model's display name."""
        return self.model_dir.resolve().name

    @property
    def num_replicas(self) -> int:
        """Number of DP ranks."""
        return len(self.workers) or self.dp

    @property
    def is_coupled(self) -> bool:
        """Whether collectives span DP ranks, so that all workers fail together."""
        return self.ep and self.num_replicas > 1

    def client_port_flags(self) -> list[str]:
        """The tokenizer's flags about its port for clients."""
        flags = {
            "insecure-bind": self.insecure_bind,
            "listen": None if self.insecure_bind else self.listen,
            "tls-cert": self.tls_cert,
            "tls-key": self.tls_key,
            "tls-ca": self.tls_ca,
            "trust-domain": self.trust_domain,
            "max-connection-age-s": self.max_connection_age_s,
        }
        return _render(flags)

    def draft_flags(self) -> list[str]:
        """The worker's flags about drafting."""
        proposer = "model" if self.draft_model is not None else self.draft_proposer
        flags = {"draft-proposer": proposer, "draft-model": self.draft_model}
        return _render(flags)


def _render(flags: Mapping[str, object]) -> list[str]:
    """Without those that are not set."""
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def split_service_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the services' flags from the launcher's own arguments.

    Returns:
        The launcher's, and each role's without its prefix, otherwise unparsed.

    Raises:
        SystemExit: a flag is reserved for the launcher.
    """
    own_args: list[str] = []
    role_to_flags: dict[str, list[str]] = {role: [] for role in ROLES}
    target = own_args
    for arg in argv:
        role, separator, flag = arg.removeprefix("--").partition(".")
        if arg.startswith("--") and separator and role in role_to_flags:
            if flag.partition("=")[0] in (_OWN_FLAGS | _TOKENIZER_FLAGS if role == "tokenizer" else _OWN_FLAGS):
                sys.stderr.write(f"error: {arg.partition('=')[0]} is set by lockstep serve\n")
                raise SystemExit(2)
            role_to_flags[role].append(f"--{flag}")
            # A value may follow; only the service knows whether the flag takes one.
            target = own_args if "=" in flag else role_to_flags[role]
        elif arg.startswith("-"):
            own_args.append(arg)
            target = own_args
        else:
            target.append(arg)
            target = own_args
    return own_args, role_to_flags
