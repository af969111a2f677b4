"""`lockstep serve`: one cell's services, as processes that start and stop together.

Once the cell has served, a process that exits is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc

from services.cli.api_key import forget_api_key, write_key_file
from services.cli.cell_plan import plan_services
from services.cli.clients.client import abandon_stdout, answer_once, describe_failure
from services.cli.clients.key_flag import metadata_of_key
from services.cli.clients.running_cells import DIRECTORY_PREFIX, RunningCell, publish_cell
from services.cli.extras import missing_packages
from services.cli.hub.model_name import parse_gguf, parse_model
from services.cli.importing import imported_directory, is_gguf
from services.cli.model_overrides import override_model
from services.cli.processes.cell_processes import CellProcesses
from services.cli.processes.display import ProcessesOutput
from services.cli.processes.preflight import (
    RefusedError,
    check_commands,
    check_length_of_sockets,
    check_listeners,
    check_packages,
)
from services.cli.processes.service_command import ROLES, ServiceCommand, find_flag
from services.cli.processes.supervisor import FIRST_DELAY_S, RestartPolicy
from services.cli.serve_arguments import read_serve_arguments
from services.cli.serve_settings import ServeSettings
from services.cli.serve_view import Output, ServeView, make_view, open_output
from shared.config import SchedulerLossSettings, load_settings, log_settings
from shared.model_files.implementations import WantedImplementation
from shared.model_files.model_dir import CONFIG, TOKENIZER
from shared.network.rpc import make_channel
from shared.process.lifecycle import SAME_STOP_S, StopRequest, freeze_garbage, run_service
from shared.process.owned_directory import owned_directory

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve until asked to stop; returns 0 if every service stopped cleanly."""
    arguments = read_serve_arguments(argv)
    if arguments.helped_role is not None:
        module = f"services.{arguments.helped_role}.config"
        return subprocess.run([sys.executable, "-m", module, "--help"], check=False).returncode
    settings, service_flags = arguments.settings, arguments.service_flags
    if settings.workers and service_flags["worker"]:
        print("error: --worker.X cannot be used with --workers, which are started elsewhere", file=sys.stderr)
        return 2
    try:
        check_packages("serve", [role for role in ROLES if role != "worker" or not settings.workers])
        settings = _with_http_or_not(settings)
        # Before a model is downloaded or imported; all addresses are checked once it is there.
        check_listeners(settings.listeners)
        settings = _with_local_model(settings, arguments.argv)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    forget_api_key()
    output = open_output(settings)
    log_settings(settings)
    return run_service(lambda stop: _serve(settings, service_flags, output, stop))


def _with_http_or_not(settings: ServeSettings) -> ServeSettings:
    """The settings without the HTTP API if its packages are missing and only the default asks for it.

    Raises:
        RefusedError: they are missing, and the settings name an address for it.
    """
    if settings.http_address is None:
        return settings
    problem = missing_packages("serve", ["http"])
    if problem is None:
        return settings
    if settings.http_listen is not None or settings.insecure_http_bind is not None:
        raise RefusedError(problem)
    print(f"note: no HTTP, only gRPC: {problem}", file=sys.stderr)
    return settings.model_copy(update={"http": False})


def _with_local_model(settings: ServeSettings, argv: Sequence[str]) -> ServeSettings:
    """The settings with a directory in place of a GGUF file, or of a model's name.

    A file is imported unless it was: then the process is another program's for a while. The files of a model of a hub
    are downloaded unless they are there.

    Raises:
        RefusedError: the model cannot be had, or what downloads it is not installed.
    """
    directory = _local_model(settings.model_dir, ["serve", *argv], settings.model_impl)
    return settings.model_copy(update={"model_dir": directory})


def _local_model(model: Path, command: Sequence[str], wanted: WantedImplementation) -> Path:
    """The directory of a model, which `command` names and `wanted` computes."""
    gguf = parse_gguf(model)
    if gguf is None and is_gguf(model):
        return imported_directory(model, command)
    name = parse_model(model)
    if gguf is None and name is None:
        if not model.exists() and len(model.parts) == 1:
            raise RefusedError(
                f"{model} is not a directory here; a model of Hugging Face's hub is named ORG/NAME, such as "
                "HuggingFaceTB/SmolLM2-135M-Instruct"
            )
        return model
    check_packages("serve", [], "pull")
    # Imported here because only a name needs it, and importing it is slow.
    from services.cli.hub.model_hub import HubError, fetch_gguf, fetch_model  # noqa: PLC0415

    try:
        if gguf is not None:
            return imported_directory(fetch_gguf(gguf), command)
        assert name is not None
        return fetch_model(name, wanted=wanted)
    except HubError as error:
        raise RefusedError(f"{model} is not a directory, and as the name of a model: {error}") from None


async def _serve(
    settings: ServeSettings, service_flags: Mapping[str, Sequence[str]], output: Output, stop: StopRequest
) -> int:
    problems: list[str] = []
    reason = "asked to stop"
    with ExitStack() as stack:
        commands: list[ServiceCommand] = []
        output.show_step(f"checking {settings.model_name} and the settings")
        try:
            commands = await _prepare(settings, service_flags, stack)
        except RefusedError as error:
            output.show_step("")
            # A signal to all processes has ended those that check the flags, too.
            if not stop.is_set():
                print(f"error: {error}", file=sys.stderr)
                output.discard()
                return 2
        output.show_step("")
        if stop.is_set():
            output.discard()
        else:
            problems, reason = await _run_cell(settings, commands, output, stop)
    if not problems:
        logger.info("ended", extra={"reason": reason})
    # The cause comes last, where the reader of the output looks first.
    for problem in reversed(problems):
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


async def _prepare(
    settings: ServeSettings, service_flags: Mapping[str, Sequence[str]], stack: ExitStack
) -> list[ServiceCommand]:
    """Plan the cell, check it, and publish it until `stack` is closed.

    Raises:
        RefusedError: it cannot be started.
    """
    try:
        runtime_dir = stack.enter_context(owned_directory(Path(tempfile.gettempdir()), DIRECTORY_PREFIX))
    except OSError as error:
        raise RefusedError(f"TMPDIR: no directory for the cell's sockets can be made: {error}") from error
    settings = _with_private_files(settings, runtime_dir)
    commands = plan_services(settings, service_flags, runtime_dir)
    check_length_of_sockets(commands, runtime_dir)
    settings.check_models([CONFIG, TOKENIZER])
    await check_commands(commands)
    scheduler = next(command for command in commands if command.role == "scheduler")
    cell = RunningCell(settings.model_name, settings.bind_address, scheduler.health_address)
    try:
        stack.enter_context(publish_cell(runtime_dir, cell))
    except OSError as error:
        raise RefusedError(f"TMPDIR: {runtime_dir} cannot be written to: {error}") from error
    return commands


def _with_private_files(settings: ServeSettings, runtime_dir: Path) -> ServeSettings:
    """The settings with a model directory and a file of keys that the settings describe, as the services take them.

    Raises:
        RefusedError: they cannot be made.
    """
    changes: dict[str, object] = {}
    if settings.model_dir.is_dir():
        overrides = settings.config_overrides, settings.generation_overrides
        changes["model_dir"] = override_model(settings.model_dir, *overrides)
    if settings.api_key is not None:
        changes["client_keys"] = runtime_dir / "client-keys"
        try:
            write_key_file(runtime_dir / "client-keys", settings.api_key.get_secret_value())
        except OSError as error:
            raise RefusedError(f"TMPDIR: {runtime_dir} cannot be written to: {error}") from error
    return settings.model_copy(update=changes)


async def _run_cell(
    settings: ServeSettings, commands: Sequence[ServiceCommand], output: Output, stop: StopRequest
) -> tuple[list[str], str]:
    """Runs until the cell fails or is asked to stop; returns the problems, the root cause first, and why it ended."""
    policy = make_restart_policy(settings, commands)
    view = make_view(settings, commands, output)
    processes_output = ProcessesOutput(output.log, settings.log_format == "text", view.display)
    cell = CellProcesses(
        commands, policy, processes_output, peer=settings.tokenizer_peer, num_spares=settings.spare_workers
    )
    running = asyncio.create_task(cell.run())
    serving = asyncio.create_task(_announce_and_answer(settings, cell, view))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({running, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if cell.has_ended_as_asked:
        # What has asked a service to end may be asking all processes, and this one last.
        await asyncio.wait({stopped}, timeout=SAME_STOP_S)
    for task in (serving, stopped):
        task.cancel()
    if stop.is_set():
        logger.info("stopping; another signal after 2 s ends answers in flight", extra={"drain_s": settings.drain_s})
        view.say_stopping()
        await cell.drain(settings.drain_s, stop.is_urgent)
    cell.end()
    ran, failure, _ = await asyncio.gather(running, serving, stopped, return_exceptions=True)
    problems = await cell.stop(settings.drain_s, stop.is_urgent, was_asked=stop.is_set())
    view.say_stopped()
    for bug in (ran, failure):
        if isinstance(bug, Exception):
            raise bug
    if isinstance(failure, str):
        problems = [failure, *problems]
    if not stop.is_set():
        return problems, "the prompt was answered"
    return problems, "asked to stop again; answers in flight were cut" if cell.has_cut_answers else "asked to stop"


def make_restart_policy(settings: ServeSettings, commands: Sequence[ServiceCommand]) -> RestartPolicy:
    """How the cell's processes are restarted.

    Requests in flight wait for a scheduler only for a time. Starts that fail take time too, so that several delays must
    fit: by default, those of seven failed starts take 35.5 of 60 s.
    """
    tokenizer = next(command for command in commands if command.role == "tokenizer")
    scheduler = next(command for command in commands if command.role == "scheduler")
    value = find_flag(tokenizer.flags, "--scheduler-lost-s")
    loss = load_settings(SchedulerLossSettings, [] if value is None else [f"--scheduler-lost-s={value}"])
    max_delay_s = max(loss.scheduler_lost_s / 6, FIRST_DELAY_S)
    return RestartPolicy(
        settings.health_kill_s, settings.max_restart_delay_s, domain_to_max_delay_s={scheduler.domain: max_delay_s}
    )


async def _announce_and_answer(settings: ServeSettings, cell: CellProcesses, view: ServeView) -> str | None:
    """Wait until the cell serves, announce it, and answer `--prompt`.

    With `--exit-after-prompt` it then returns what went wrong; else it runs until cancelled.
    """
    await view.wait(cell.has_served)
    # Closed channels keep their connections until the garbage collector breaks the cycles that hold them.
    freeze_garbage()
    try:
        view.announce()
        failure = None if settings.prompt is None else await _answer_prompt(settings, settings.prompt)
    except OSError as error:
        abandon_stdout()
        failure = f"stdout cannot be written: {error}"
    if settings.exit_after_prompt:
        return failure
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
    await asyncio.Event().wait()
    return None


async def _answer_prompt(settings: ServeSettings, prompt: str) -> str | None:
    """Returns why the answer is missing or incomplete, or None."""
    print(f"\n> {prompt}", flush=True)
    try:
        async with make_channel(settings.bind_address, peer=settings.tokenizer_peer) as channel:
            key = settings.api_key
            await answer_once(channel, prompt, () if key is None else metadata_of_key(key.get_secret_value()))
    except grpc.aio.AioRpcError as error:
        return f"the prompt was not answered: {describe_failure(error)}"
    return None
