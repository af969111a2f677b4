"""`lockstep serve`: the services of one cell on this machine, as processes that start and stop together.

It decides nothing about requests. When a service ends by itself, all are stopped.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from shared.cli.client import answer_once, describe_failure
from shared.cli.request_flags import DEFAULT_TARGET
from shared.cli.service_process import ServiceCommand, ServiceProcess
from shared.config import DraftProposerName, LocalAddress, ServiceSettings, load_settings, log_settings
from shared.health import wait_until_serving
from shared.lifecycle import freeze_garbage, run_service
from shared.logging import configure_logging
from shared.rpc import make_channel

logger = logging.getLogger(__name__)

# More than a service takes to stop cleanly.
STOP_GRACE_S = 10.0

# In the order of their start; they stop in the opposite one, so that none loses what it works with.
ROLES = ("worker", "scheduler", "tokenizer")
_OWN_FLAGS = ("listen", "insecure-bind", "model-dir", "scheduler", "worker")


class ServeSettings(ServiceSettings):
    """Start one cell on this machine: worker, scheduler and tokenizer, each a process.

    --worker.X, --scheduler.X and --tokenizer.X go to that service as its flag --X; a value stands behind it or
    after "=". `python -m services.worker --help` lists a service's flags.
    """

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SERVE_", cli_prog_name="lockstep serve")

    model_dir: CliPositionalArg[Path] = Field(description="Directory of the model, in Hugging Face's layout.")
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
    def _check_draft_model(self) -> ServeSettings:
        if self.draft_proposer is not None and (self.draft_proposer == "model") is not (self.draft_model is not None):
            raise ValueError("--draft-proposer model and --draft-model go together")
        return self

    def draft_flags(self) -> list[str]:
        """What the worker is told of drafts."""
        proposer = "model" if self.draft_model is not None else self.draft_proposer
        flags = {"draft-proposer": proposer, "draft-model": self.draft_model}
        return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit code, 0 when every service stopped cleanly."""
    own_args, service_flags = split_service_flags(argv)
    settings = load_settings(ServeSettings, own_args)
    configure_logging(service="serve", level=settings.log_level, log_format=settings.log_format)
    log_settings(settings)
    return run_service(lambda stop: _serve(settings, service_flags, stop))


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


def plan_services(
    settings: ServeSettings, service_flags: Mapping[str, Sequence[str]], runtime_dir: Path
) -> list[ServiceCommand]:
    """The commands of one cell, in the order of their start; links are sockets in `runtime_dir` unless told."""
    worker = f"unix:{runtime_dir / 'worker.sock'}"
    scheduler = settings.scheduler_listen or f"unix:{runtime_dir / 'scheduler.sock'}"
    bind = f"--insecure-bind={settings.insecure_bind}" if settings.insecure_bind else f"--listen={settings.listen}"
    model_dir = f"--model-dir={settings.model_dir}"
    role_to_links = {
        "worker": (worker, [f"--listen={worker}", model_dir, *settings.draft_flags()]),
        "scheduler": (scheduler, [f"--listen={scheduler}", f"--worker={worker}"]),
        "tokenizer": (settings.bind_address, [bind, f"--scheduler={scheduler}", model_dir]),
    }
    shared_flags = [f"--log-level={settings.log_level}", f"--log-format={settings.log_format}"]
    if settings.reflection:
        shared_flags.append("--reflection")
    return [
        ServiceCommand(role, (*links, *shared_flags, *service_flags.get(role, ())), address)
        for role, (address, links) in role_to_links.items()
    ]


async def _serve(settings: ServeSettings, service_flags: Mapping[str, Sequence[str]], stop: asyncio.Event) -> int:
    with tempfile.TemporaryDirectory(prefix="lockstep-") as runtime_dir:
        commands = plan_services(settings, service_flags, Path(runtime_dir))
        services: list[ServiceProcess] = []
        try:
            for command in commands:
                service = await _start(command, settings)
                services.append(service)
            exit_code = await _run_until_an_end(settings, commands, services, stop)
        finally:
            dead = [service for service in services if service.problem]
            for service in reversed(services):
                await service.stop(STOP_GRACE_S)
    # Who ended by itself comes first: the others' trouble may follow from it.
    problems = [service.problem for service in sorted(services, key=lambda service: service not in dead)]
    for problem in filter(None, problems):
        print(f"error: {problem}", file=sys.stderr)
    return exit_code or int(any(problems))


async def _start(command: ServiceCommand, settings: ServeSettings) -> ServiceProcess:
    # A JSON record names its service itself.
    line_prefix = f"{command.role:<9} | " if settings.log_format == "text" else ""
    service = await ServiceProcess.start(command, line_prefix=line_prefix)
    logger.info("started", extra={"role": command.role, "pid": service.pid})
    return service


async def _run_until_an_end(
    settings: ServeSettings, commands: Sequence[ServiceCommand], services: Sequence[ServiceProcess], stop: asyncio.Event
) -> int:
    """Wait for a signal, the end of a service, or that of the only prompt; returns the exit code so far."""
    bring_up = asyncio.create_task(_bring_up(settings, commands, stop))
    exits = [asyncio.create_task(service.wait()) for service in services]
    stopped = asyncio.create_task(stop.wait())
    tasks: list[asyncio.Task[object]] = [bring_up, *exits, stopped]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    exit_code = bring_up.result() if bring_up.done() else 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return exit_code


async def _bring_up(settings: ServeSettings, commands: Sequence[ServiceCommand], stop: asyncio.Event) -> int:
    for command in commands:
        await _wait_until_serving(command.address)
    # Closed channels keep their connections until the cycles that hold them are collected.
    freeze_garbage()
    scheduler = next(command.address for command in commands if command.role == "scheduler")
    print(f"ready: serving {settings.model_dir.name} on {settings.bind_address}, scheduler on {scheduler}", flush=True)
    exit_code = 0
    if settings.prompt is not None:
        exit_code = await _answer_prompt(settings.bind_address, settings.prompt)
    if not settings.exit_after_prompt:
        await stop.wait()
        return 0
    return exit_code


async def _wait_until_serving(address: str) -> None:
    # As a link of the cell it tries again quickly while the server is not there yet.
    async with make_channel(address, internal=True) as channel:
        await wait_until_serving(channel)


async def _answer_prompt(address: str, prompt: str) -> int:
    print(f"\n> {prompt}", flush=True)
    try:
        async with make_channel(address) as channel:
            await answer_once(channel, prompt)
    except grpc.aio.AioRpcError as error:
        print(f"error: {describe_failure(error)}", file=sys.stderr)
        return 1
    return 0
