"""What `lockstep serve` checks before it starts anything: the model's directory, its addresses, the services' flags."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from shared.cli.cell_plan import ServiceCommand, make_start_flags
from shared.cli.child_process import start_child
from shared.cli.last_words import LastWords
from shared.cli.serve_settings import ServeSettings
from shared.model_dir import CONFIG, TOKENIZER, ModelDirectoryError, read_json
from shared.rpc import refuse_taken_socket


class RefusedError(Exception):
    """The cell cannot be started so; the message says why."""


async def check_cell(settings: ServeSettings, commands: Sequence[ServiceCommand]) -> None:
    """Check what can be checked in less than a second.

    Args:
        settings: The launcher's.
        commands: Of the services that it would start.

    Raises:
        RefusedError: the cell cannot be started so.
    """
    check_model_dir(settings.model_dir, [CONFIG, TOKENIZER])
    if settings.draft_model is not None:
        check_model_dir(settings.draft_model, [CONFIG])
    check_addresses([*(command.address for command in commands), *_metrics_addresses(commands)])
    await _check_flags(commands)


def check_model_dir(model_dir: Path, names: Sequence[str]) -> None:
    """Check that a directory has files, each a JSON object.

    Raises:
        RefusedError: it has not, or there is no such directory.
    """
    if not model_dir.is_dir():
        raise RefusedError(f"{model_dir} is no directory")
    for name in names:
        if not (model_dir / name).is_file():
            raise RefusedError(f"{model_dir} is no model's directory: it has no {name}")
    try:
        read_json(model_dir, CONFIG)
    except ModelDirectoryError as error:
        raise RefusedError(str(error)) from None


def check_addresses(addresses: Iterable[str]) -> None:
    """Check that a server could be started on each, beside those on the others.

    Raises:
        RefusedError: one is taken, or not usable.
    """
    with ExitStack() as listeners:
        for address in addresses:
            try:
                if address.startswith("unix:"):
                    _check_socket_path(address.removeprefix("unix:"))
                else:
                    _try_to_listen(address, listeners)
            except (OSError, RuntimeError) as error:
                raise RefusedError(f"cannot listen on {address}: {_reason(error)}") from None


def _metrics_addresses(commands: Sequence[ServiceCommand]) -> Iterator[str]:
    """Where services are told to serve metrics."""
    for command in commands:
        for flag, following in zip(command.flags, (*command.flags[1:], ""), strict=True):
            name, separator, value = flag.partition("=")
            if name == "--metrics-listen":
                yield value if separator else following


def _reason(error: OSError | RuntimeError) -> str:
    # A name that is not found has a number of its own; of other errors the text repeats the address.
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _check_socket_path(path: str) -> None:
    refuse_taken_socket(path)
    if not os.access(Path(path).parent, os.W_OK | os.X_OK):
        raise RuntimeError("no socket can be made in that directory")


def _try_to_listen(address: str, listeners: ExitStack) -> None:
    """Listen on every address that a name has; one of them is enough, but none may be taken."""
    host, _, port = address.rpartition(":")
    infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    errors = []
    for family, _, _, _, socket_address in infos:
        try:
            listeners.enter_context(socket.create_server(socket_address, family=family))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            errors.append(error)
    if len(errors) == len(infos):
        raise errors[0]


async def _check_flags(commands: Sequence[ServiceCommand]) -> None:
    """Have each service's own settings read its flags; of several workers the first one's: the others' are alike."""
    first_of_role = {command.role: command for command in reversed(commands)}
    problems = await asyncio.gather(*(_find_problem(command, commands) for command in first_of_role.values()))
    for role, problem in zip(first_of_role, problems, strict=True):
        if problem is not None:
            raise RefusedError(f"the {role} refuses its settings: {problem}")


async def _find_problem(command: ServiceCommand, commands: Sequence[ServiceCommand]) -> str | None:
    domain = [other for other in commands if other.domain == command.domain]
    # The module of the settings, run by itself, reads them and ends: it imports nothing that takes long.
    process = await start_child(f"services.{command.role}.config", [*command.flags, *make_start_flags(domain)])
    output, _ = await process.communicate()
    if process.returncode == 0:
        return None
    last_words = LastWords()
    for line in output.splitlines():
        last_words.add(line)
    return last_words.text or f"code {process.returncode}"
