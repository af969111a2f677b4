"""What a launcher checks before it starts anything."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.cli.extras import ROLE_TO_EXTRA, missing_packages
from services.cli.processes import flag_checks
from services.cli.processes.last_problem import LastProblem
from services.cli.processes.service_command import Listener, ServiceCommand
from shared.model_files.embedders import Task, as_causal, served_config
from shared.model_files.implementations import WantedImplementation, implementation_of
from shared.model_files.model_dir import (
    CONFIG,
    ModelDirectoryError,
    missing_advice,
    read_config,
    read_json,
    refuse_pointer,
)
from shared.model_files.tiktoken_vocabulary import convert_vocabulary
from shared.network.listening import MAX_SOCKET_PATH_BYTES, check_can_listen
from shared.process.parent import leave_end_to_parent


class RefusedError(Exception):
    """The processes cannot be started; the message says why."""


def check_packages(launcher: str, roles: Iterable[str], *more_extras: str) -> None:
    """Check that what the services import is installed.

    Args:
        launcher: The subcommand of `lockstep`.
        more_extras: What the launcher itself needs.

    Raises:
        RefusedError: a package is missing; the message names its extra.
    """
    problem = missing_packages(launcher, {*map(ROLE_TO_EXTRA.__getitem__, roles), *more_extras})
    if problem is not None:
        raise RefusedError(problem)


async def check_commands(commands: Sequence[ServiceCommand], *, own_listeners: Sequence[Listener] = ()) -> None:
    """Check what takes less than a second.

    Args:
        own_listeners: Where the launcher itself will listen.

    Raises:
        RefusedError: the processes cannot be started.
    """
    check_listeners([*own_listeners, *(listener for command in commands for listener in command.listeners)])
    await read_settings(commands)


def check_model_dir(
    model_dir: Path, names: Sequence[str], wanted: WantedImplementation, task: Task = "generate"
) -> None:
    """Check that a directory has the named files, and a `config.json` of an architecture that is served so.

    A `tokenizer.json` that is missing is made of Kimi's `tiktoken.model`, if there is that.

    Raises:
        RefusedError: it does not.
    """
    if not model_dir.is_dir():
        raise RefusedError(f"{model_dir} is not a directory")
    try:
        convert_vocabulary(model_dir)
    except ModelDirectoryError as error:
        raise RefusedError(str(error)) from None
    for name in names:
        if not (model_dir / name).is_file():
            advice = missing_advice(model_dir, name)
            raise RefusedError(f"{model_dir} is not a model directory: it has no {name}{advice and f'; {advice}'}")
    try:
        for name in names:
            refuse_pointer(model_dir / name)
        read_json(model_dir, CONFIG)
    except ModelDirectoryError as error:
        raise RefusedError(str(error)) from None
    try:
        config = read_config(model_dir)
        # What a worker's own flags say of the task, it checks itself.
        implementation_of(served_config(config, task) if task == "embed" else as_causal(config), wanted)
    except ModelDirectoryError as error:
        raise RefusedError(f"{model_dir}: {error}") from None


def check_length_of_sockets(commands: Sequence[ServiceCommand], directory: Path) -> None:
    """Check that the paths of the sockets in the launcher's temporary directory are not too long.

    Raises:
        RefusedError: one is.
    """
    addresses = [address for command in commands for address in (command.address, command.cell_address) if address]
    sockets = [address.removeprefix("unix:") for address in addresses if address.startswith(f"unix:{directory}/")]
    num_bytes = max(len(os.fsencode(path)) for path in sockets)
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise RefusedError(
            f"TMPDIR: {directory.parent} is too long: the paths of the cell's sockets would have {num_bytes} bytes, "
            f"and that of a socket has at most {MAX_SOCKET_PATH_BYTES}"
        )


def check_listeners(listeners: Iterable[Listener]) -> None:
    """Check that servers could listen on all addresses at once.

    Raises:
        RefusedError: an address is in use or not usable; the message names its flag.
    """
    with ExitStack() as taken:
        for listener in listeners:
            try:
                check_can_listen(listener.address, taken)
            except RuntimeError as error:
                raise RefusedError(f"{listener.flag}: cannot listen on {listener.address}: {error}") from None


async def read_settings(commands: Sequence[ServiceCommand]) -> dict[str, dict[str, Any]]:
    """Let each service read its own flags; of the workers only the last one, which has the highest device index.

    Returns:
        The settings of each role that differ from their defaults, by the names of fields.

    Raises:
        RefusedError: one rejects its flags.
    """
    last_of_role = {command.role: command for command in commands}
    module_to_role = {f"services.{role}.config": role for role in last_of_role}
    checks = [(module, last_of_role[role].flags) for module, role in module_to_role.items()]
    # Only a worker on a GPU imports something slow. Not through the event loop, in whose children no signal is blocked.
    with leave_end_to_parent():
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", flag_checks.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    output, _ = await asyncio.to_thread(process.communicate, json.dumps(checks).encode())
    if process.returncode == 0:
        lines = [line for line in output.decode().split("\n") if line.startswith(flag_checks.SETTINGS)]
        return {role: json.loads(line[1:]) for role, line in zip(last_of_role, lines, strict=True)}
    _, _, last = output.rpartition(flag_checks.MARK.encode())
    module, _, said = last.partition(b"\n")
    last_problem = LastProblem()
    for line in said.splitlines():
        last_problem.add(line)
    role = module_to_role.get(module.decode(), "service")
    raise RefusedError(f"the {role} rejects its settings: {last_problem.text or f'exit code {process.returncode}'}")
