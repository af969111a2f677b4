"""What `lockstep serve` can be told: its own flags, and those that it passes on to the services unread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from shared.cli.request_flags import DEFAULT_TARGET
from shared.config import Addresses, DraftProposerName, LocalAddress, ServiceSettings

# In the order of their start; they stop in the opposite one, so that none loses what it works with.
ROLES = ("worker", "scheduler", "tokenizer")

_OWN_FLAGS = frozenset(
    (
        *("listen", "insecure-bind", "cell-listen", "insecure-cell-bind"),
        *("model-dir", "scheduler", "workers", "coupled", "ep", "no-ep"),
        *("dp-rank", "dp-size", "tp-rank", "tp-size", "leader", "rendezvous", "domain-start-id"),
    )
)


class ServeSettings(ServiceSettings):
    """Start one cell on this machine: its workers, a scheduler and a tokenizer, each a process that is started again.

    --worker.X, --scheduler.X and --tokenizer.X go to that service as its flag --X; a value stands behind it or
    after "=". `python -m services.worker --help` lists a service's flags.
    """

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SERVE_", cli_prog_name="lockstep serve")

    model_dir: CliPositionalArg[Path] = Field(description="Directory of the model, in Hugging Face's layout.")
    tp: int = Field(default=1, ge=1, description="Workers that share each replica of the model (tensor parallelism).")
    dp: int = Field(default=1, ge=1, description="Replicas of the model (data parallelism), each of --tp workers.")
    ep: bool = Field(
        default=False,
        description="Split experts over all workers (expert parallelism), which step in lockstep then and are one "
        "failure domain.",
    )
    workers: Addresses = Field(
        default=(),
        description="Use workers that somebody else started: the address of each replica's first one, by DP rank and "
        "with commas between them.",
    )
    listen: LocalAddress = Field(
        default=DEFAULT_TARGET, description="Address for clients: HOST:PORT on loopback, or unix:PATH."
    )
    scheduler_listen: LocalAddress | None = Field(
        default=None,
        description="Address of the scheduler, for `lockstep top` and clients that bring tokens; private if not set.",
    )
    draft_proposer: DraftProposerName | None = Field(
        default=None, description="Who drafts tokens; if not set: model with --draft-model, else none."
    )
    draft_model: Path | None = Field(
        default=None, description="Directory of a second, smaller model with the same tokenizer, which drafts tokens."
    )
    health_kill_s: float = Field(
        default=30.0,
        ge=1.0,
        allow_inf_nan=False,
        description="A process that has not answered its health check for so many seconds is killed and started again.",
    )
    max_restart_delay_s: float = Field(
        default=30.0,
        ge=0.5,
        allow_inf_nan=False,
        description="A process that exits before it is ready is started again after 0.5 s, the next time after twice "
        "as long, and so on up to so many seconds. One that was ready is started again at once, and after 5 s from the "
        "fourth time within a minute on.",
    )
    # Excluded from the settings that are logged: no prompt is.
    prompt: str | None = Field(
        default=None, exclude=True, description="Once ready, ask this and stream the answer to stdout."
    )
    exit_after_prompt: bool = Field(default=False, description="Stop when the prompt is answered.")

    @model_validator(mode="after")
    def _check_prompt(self) -> ServeSettings:
        if self.exit_after_prompt and self.prompt is None:
            raise ValueError("--exit-after-prompt needs --prompt")
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> ServeSettings:
        if self.scheduler_listen == self.bind_address:
            raise ValueError("--scheduler-listen is the address of the tokenizer: each needs its own")
        for address in (self.bind_address, self.scheduler_listen):
            if address and not address.startswith("unix:") and int(address.rpartition(":")[2]) == 0:
                raise ValueError(f"{address} has no port: the launcher must know where to ask for a service's health")
        return self

    @model_validator(mode="after")
    def _check_draft_model(self) -> ServeSettings:
        if self.draft_proposer is not None and (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model go together")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> ServeSettings:
        if not self.workers:
            return self
        if "tp" in self.model_fields_set:
            raise ValueError("--tp does not go with --workers, which are started elsewhere")
        if "dp" in self.model_fields_set and self.dp != len(self.workers):
            raise ValueError(f"--dp {self.dp} does not go with {len(self.workers)} --workers")
        if self.draft_flags():
            raise ValueError("--draft-proposer and --draft-model do not go with --workers, which are started elsewhere")
        return self

    @property
    def model_name(self) -> str:
        """What people are told that is served."""
        return self.model_dir.resolve().name

    @property
    def num_replicas(self) -> int:
        """DP ranks of the cell."""
        return len(self.workers) or self.dp

    @property
    def is_coupled(self) -> bool:
        """Whether collectives span DP ranks, so that all workers stand and fall together."""
        return self.ep and self.num_replicas > 1

    def draft_flags(self) -> list[str]:
        """What the worker is told of drafts."""
        proposer = "model" if self.draft_model is not None else self.draft_proposer
        flags = {"draft-proposer": proposer, "draft-model": self.draft_model}
        return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def split_service_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Take the services' flags out of the launcher's arguments.

    Returns:
        The arguments that are left, and for each role its flags without the role's name, otherwise unread.

    Raises:
        SystemExit: a flag that the launcher sets itself; it is named on stderr.
    """
    own_args: list[str] = []
    role_to_flags: dict[str, list[str]] = {role: [] for role in ROLES}
    target = own_args
    for arg in argv:
        role, separator, flag = arg.removeprefix("--").partition(".")
        if arg.startswith("--") and separator and role in role_to_flags:
            if flag.partition("=")[0] in _OWN_FLAGS:
                sys.stderr.write(f"error: {arg.partition('=')[0]} is set by lockstep serve\n")
                raise SystemExit(2)
            role_to_flags[role].append(f"--{flag}")
            # A value may follow; whether the flag takes one only the service knows.
            target = own_args if "=" in flag else role_to_flags[role]
        elif arg.startswith("-"):
            own_args.append(arg)
            target = own_args
        else:
            target.append(arg)
            target = own_args
    return own_args, role_to_flags
