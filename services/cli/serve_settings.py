"""The settings of `lockstep serve`, and the flags for the services."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, FilePath, SecretStr, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from services.cli.clients.request_flags import DEFAULT_TARGET
from services.cli.launcher_settings import RANK_FLAGS, LauncherSettings, render_flags, split_flags
from services.cli.processes.service_command import Listener
from shared.config import HttpPortSettings
from shared.network.addresses import split_address
from shared.network.rpc import Peer, make_peer
from shared.network.tls import Role
from shared.setting_types import Addresses, JsonObjectText, ListenAddress, LocalAddress
from shared.tenants.client_keys import check_key

GENERATION_KEYS = frozenset(
    {
        *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "eos_token_id"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
)
"""What workers read in generation_config.json."""
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
_OWN_FLAGS = frozenset({*RANK_FLAGS, "cell-listen", "insecure-cell-bind", "scheduler", "workers", "coupled"})
# The launcher's own settings of these names are the tokenizer's.
_TOKENIZER_FLAGS = frozenset(
    {
        *("tls-cert", "tls-key", "tls-ca", "trust-domain", "max-connection-age-s"),
        *("http-listen", "insecure-http-bind", "client-keys", "client-ca", "chat-template"),
    }
)
RESERVED_FLAGS = {
    "worker": _OWN_FLAGS,
    "scheduler": _OWN_FLAGS | {"client-keys"},
    "tokenizer": _OWN_FLAGS | _TOKENIZER_FLAGS,
}
"""What only the launcher may give each service."""


class ServeSettings(LauncherSettings, HttpPortSettings):
    """Start one cell on this machine: workers, a scheduler and a tokenizer, each a process that is restarted on exit.

    --worker.X, --scheduler.X and --tokenizer.X are passed to that service as --X; a value follows as the next argument
    or after "=". `python -m services.worker --help` lists a service's flags. The services talk over unix sockets, so
    TLS is for --listen, with a certificate of the role tokenizer.
    """

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SERVE_", cli_prog_name="lockstep serve")

    role = Role.TOKENIZER

    model_dir: CliPositionalArg[Path] = Field(
        description="Model directory, in Hugging Face's layout; a GGUF file, which is imported once, into the cache of "
        "`lockstep pull`; or the name of a model to download: ORG/NAME or ORG/NAME@REVISION, as for `lockstep pull`, "
        "or of a GGUF file of it: ORG/NAME/FILE.gguf, or ORG/NAME:KIND as in ORG/NAME:Q4_K_M.",
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
    http: bool = Field(
        default=True,
        description=f"Serve the HTTP API on {DEFAULT_HTTP_ADDRESS} if neither --http-listen nor --insecure-http-bind "
        "says where.",
    )
    http_listen: ListenAddress | None = Field(
        default=None,
        description="Address of the HTTP API (OpenAI's): unix:PATH, HOST:PORT on loopback, or with TLS any HOST:PORT. "
        f"{DEFAULT_HTTP_ADDRESS} if not set, unless --no-http is.",
    )
    generic_tools: bool = Field(
        default=False,
        description="Whether a model whose chat template takes no tools gets them too; see the tokenizer's.",
    )
    scheduler_listen: LocalAddress | None = Field(
        default=None,
        description="Scheduler address for clients that send token ids, HOST:PORT on loopback or unix:PATH; private if "
        "not set.",
    )
    chat_template: FilePath | None = Field(
        default=None, description="File with a chat template (Jinja), used instead of the model's own."
    )
    hf_overrides: JsonObjectText | None = Field(
        default=None,
        description="JSON object of values to replace in the model's config.json, for every worker and the tokenizer. "
        "They are part of the model's digest.",
    )
    override_generation_config: JsonObjectText | None = Field(
        default=None,
        description="JSON object of values to replace in the model's generation_config.json, which has the defaults of "
        "sampling.",
    )
    # Excluded from the logged settings.
    api_key: SecretStr | None = Field(
        default=None,
        exclude=True,
        description="The one key that clients need, without a file of keys. LOCKSTEP_API_KEY has it without showing it "
        "to the machine's other users.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds that answers in flight may take to finish once the cell, or one of its processes, is "
        "asked to end. Another signal, more than 2 s later, ends the cell at once; an idle one ends at once anyway.",
    )
    verbose: bool = Field(
        default=False,
        description="In a terminal, write the services' log there; by default it goes to a file, whose name is shown.",
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
        if self.client_keys is not None and self.prompt is not None:
            raise ValueError("--prompt cannot be used with --client-keys: use `lockstep generate --key-file`")
        return self

    @model_validator(mode="after")
    def _check_api_key(self) -> ServeSettings:
        if self.api_key is not None:
            if self.client_keys is not None:
                raise ValueError("--api-key cannot be used with --client-keys: give the key a line in the file")
            check_key(self.api_key.get_secret_value(), "--api-key (or LOCKSTEP_API_KEY)")
        return self

    @model_validator(mode="after")
    def _check_generation(self) -> ServeSettings:
        if unknown := sorted(self.generation_overrides.keys() - GENERATION_KEYS):
            known = ", ".join(sorted(GENERATION_KEYS))
            raise ValueError(f"--override-generation-config: {unknown[0]!r} is not read; there are {known}")
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> ServeSettings:
        if self.scheduler_listen == self.bind_address:
            raise ValueError("--scheduler-listen is the tokenizer's address: each service needs its own")
        for address in (self.bind_address, self.scheduler_listen):
            if address and not address.startswith("unix:") and split_address(address)[1] == 0:
                raise ValueError(f"{address} has no fixed port: the launcher needs one for its health checks")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> ServeSettings:
        if not self.workers:
            self.check_spares(self.dp * self.tp)
            return self
        if self.spare_workers:
            raise ValueError("--spare-workers cannot be used with --workers, which are started elsewhere")
        if "tp" in self.model_fields_set:
            raise ValueError("--tp cannot be used with --workers, which are started elsewhere")
        if "dp" in self.model_fields_set and self.dp != len(self.workers):
            raise ValueError(f"--dp {self.dp} does not match the {len(self.workers)} --workers")
        if self.config_overrides or self.generation_overrides:
            flags = "--hf-overrides and --override-generation-config"
            raise ValueError(f"{flags} cannot be used with --workers, started elsewhere")
        if self.model_flags():
            flags = "--max-model-len, --model-impl, --task, --draft-proposer and --draft-model"
            raise ValueError(f"{flags} cannot be used with --workers, started elsewhere")
        return self

    @property
    def http_address(self) -> str | None:
        """The address of the HTTP API; None if there is none."""
        return super().http_address or (DEFAULT_HTTP_ADDRESS if self.http else None)

    @property
    def listeners(self) -> list[Listener]:
        """The addresses for clients, of which no model has to be known."""
        addresses = {
            "--insecure-bind" if self.insecure_bind else "--listen": self.bind_address,
            "--insecure-http-bind" if self.insecure_http_bind else "--http-listen": self.http_address,
            "--scheduler-listen": self.scheduler_listen,
        }
        return [Listener(flag, address) for flag, address in addresses.items() if address is not None]

    @property
    def config_overrides(self) -> dict[str, Any]:
        """What to replace in config.json."""
        return json.loads(self.hf_overrides) if self.hf_overrides else {}

    @property
    def generation_overrides(self) -> dict[str, Any]:
        """What to replace in generation_config.json."""
        return json.loads(self.override_generation_config) if self.override_generation_config else {}

    @property
    def tokenizer_peer(self) -> Peer | None:
        """The peer of channels to the tokenizer."""
        return make_peer(self.certificates, Role.TOKENIZER)

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
            "http-listen": None if self.insecure_http_bind else self.http_address,
            "insecure-http-bind": self.insecure_http_bind,
            "tls-cert": self.tls_cert,
            "tls-key": self.tls_key,
            "tls-ca": self.tls_ca,
            "trust-domain": self.trust_domain,
            "client-ca": self.client_ca,
            "max-connection-age-s": self.max_connection_age_s,
        }
        return [*render_flags(flags), *self.key_flags()]

    def template_flags(self) -> list[str]:
        """The tokenizer's flag about the chat template."""
        return render_flags({"chat-template": self.chat_template})

    def key_flags(self) -> list[str]:
        """The flags about keys of both client ports, even though the scheduler's may be private."""
        return render_flags({"client-keys": self.client_keys})


def split_service_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the services' flags from those of `lockstep serve`; see `split_flags`."""
    return split_flags(argv, RESERVED_FLAGS, "lockstep serve")
