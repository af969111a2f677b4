"""The settings that launchers share, and the flags that they pass on unread."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from services.cli.processes.preflight import check_model_dir
from services.cli.processes.service_flags import ROLE_TO_FLAGS
from shared.config import ServiceSettings
from shared.model_files.embedders import TASK_DESCRIPTION, Task
from shared.model_files.implementations import MODEL_IMPL_DESCRIPTION, WantedImplementation
from shared.model_files.model_dir import CONFIG, display_name
from shared.setting_types import MAX_MODEL_LEN_DESCRIPTION, DraftProposerName, MaxModelLen

RANK_FLAGS = frozenset(
    {
        *("listen", "insecure-bind", "model-dir", "ep", "no-ep", "drain-s"),
        *("dp-rank", "dp-size", "tp-rank", "tp-size", "device-index", "leader"),
    }
)
"""What every launcher itself gives a worker."""


class LauncherSettings(ServiceSettings):
    """What ranks compute, and how their processes are restarted."""

    model_dir: CliPositionalArg[Path] = Field(description="Model directory, in Hugging Face's layout.")
    tp: int = Field(default=1, ge=1, description="Workers per model replica (tensor parallelism).")
    dp: int = Field(default=1, ge=1, description="Model replicas (data parallelism), each of --tp workers.")
    ep: bool = Field(
        default=False,
        description="Split the experts over all workers (expert parallelism). With several replicas, all workers then "
        "step in lockstep and are one failure domain.",
    )
    max_model_len: MaxModelLen = Field(default="auto", description=MAX_MODEL_LEN_DESCRIPTION)
    model_impl: WantedImplementation = Field(default="auto", description=MODEL_IMPL_DESCRIPTION)
    task: Task = Field(default="generate", description=TASK_DESCRIPTION)
    draft_proposer: DraftProposerName | None = Field(
        default=None, description="How draft tokens are proposed; if not set, model with --draft-model, else none."
    )
    draft_model: Path | None = Field(
        default=None, description="Directory of a second, smaller model with the same tokenizer, which drafts tokens."
    )
    config: Path | None = Field(
        default=None,
        description="File with settings in YAML: --X below the name X, and --ROLE.X in a section ROLE. The environment "
        "overrides it, and a flag both.",
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
        "5 s from the fourth restart within a minute on. A scheduler's delay is at most a sixth of the tokenizer's "
        "--scheduler-lost-s.",
    )
    spare_workers: int = Field(
        default=0,
        ge=0,
        description="Processes that are kept with all imports done, and become the next workers that are started, "
        "which are then ready some 2 s earlier; no more than there are workers. Each takes about 170 MB of memory of "
        "its own, beside libraries that it shares with the workers, and no processor time while it waits.",
    )

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.draft_proposer is not None and (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model must be used together")
        return self

    def check_spares(self, num_workers: int) -> None:
        """Check that there are no more spare workers than workers that the launcher starts.

        Raises:
            ValueError: there are.
        """
        if self.spare_workers > num_workers:
            some = "1 worker" if num_workers == 1 else f"{num_workers} workers"
            raise ValueError(f"--spare-workers {self.spare_workers} is more than the {some} that could need one")

    @property
    def model_name(self) -> str:
        """The model's display name."""
        return display_name(self.model_dir)

    def check_models(self, names: Sequence[str]) -> None:
        """Check that the model's directory has the named files, and the draft model's a configuration.

        Raises:
            RefusedError: one has not.
        """
        check_model_dir(self.model_dir, names, self.model_impl, self.task)
        if self.draft_model is not None:
            check_model_dir(self.draft_model, [CONFIG], "auto")

    def model_flags(self) -> list[str]:
        """The worker's flags about the model's code, its context and task, and drafting."""
        proposer = "model" if self.draft_model is not None else self.draft_proposer
        context = None if self.max_model_len == "auto" else self.max_model_len
        implementation = None if self.model_impl == "auto" else self.model_impl
        task = None if self.task == "generate" else self.task
        flags: dict[str, object] = {"max-model-len": context, "model-impl": implementation, "task": task}
        flags |= {"draft-proposer": proposer, "draft-model": self.draft_model}
        return render_flags(flags)


def flags_of_roles(roles: Iterable[str]) -> list[str]:
    """The services' flags, as a launcher takes them."""
    return [f"--{role}.{flag}" for role in roles for flag in ROLE_TO_FLAGS[role] if flag not in RANK_FLAGS]


def render_flags(flags: Mapping[str, object]) -> list[str]:
    """Flags with their values, without those that are not set."""
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def split_flags(
    argv: Sequence[str], reserved: Mapping[str, AbstractSet[str]], command: str
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the services' flags from the launcher's own arguments.

    Args:
        reserved: The launcher's services, each with the names of flags that only the launcher may give it.
        command: The launcher's name.

    Returns:
        The launcher's, and each role's without its prefix, otherwise unparsed.

    Raises:
        SystemExit: a flag is reserved for the launcher.
    """
    own_args: list[str] = []
    role_to_flags: dict[str, list[str]] = {role: [] for role in reserved}
    target = own_args
    for arg in argv:
        role, separator, flag = arg.removeprefix("--").partition(".")
        if arg.startswith("--") and separator and role in role_to_flags:
            if flag.partition("=")[0] in reserved[role]:
                sys.stderr.write(f"error: {arg.partition('=')[0]} is set by {command}\n")
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
