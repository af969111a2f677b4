"""What `lockstep serve` writes about its cell: log lines, or in a terminal what a person wants to know."""

from __future__ import annotations

import asyncio
import atexit
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.cli.clients.running_cells import DIRECTORY_PREFIX
from services.cli.http_lines import describe_http
from services.cli.processes.display import Display, LogDisplay
from services.cli.processes.launch_screen import LaunchScreen, describe_model, describe_place, describe_room
from services.cli.processes.service_command import ServiceCommand
from services.cli.serve_settings import ServeSettings
from shared.process.line_writer import LineWriter
from shared.process.logging import configure_logging, log_to

_TICK_S = 1.0
# How long what comes on stdout, or the end of the process, waits for what was written to stderr before it.
_LINES_BEFORE_S = 1.0


class ServeView(Protocol):
    """Says how the cell is doing."""

    @property
    def display(self) -> Display:
        """Takes in what happens to the processes."""

    async def wait(self, has_served: asyncio.Event) -> None:
        """Return once the cell has served; meanwhile show that time passes."""

    def announce(self) -> None:
        """Say that the cell serves, and where.

        Raises:
            OSError: stdout cannot be written.
        """

    def say_stopping(self) -> None:
        """Say that the cell was asked to end."""

    def say_stopped(self) -> None:
        """Say that the cell has ended, for whatever reason."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where the log goes."""

    terminal: LineWriter
    """The writer of stderr."""
    log: LineWriter
    """The writer of the log and of the services' output."""
    log_path: Path | None = None
    """The log's file; None means stderr."""

    def show_step(self, text: str) -> None:
        """Show a person what is done before anything is started; an empty text removes it."""
        if self.log_path is not None:
            self.terminal.show(text)

    def discard(self) -> None:
        """Remove the log's file, which says nothing: nothing was started."""
        if self.log_path is not None:
            self.log_path.unlink(missing_ok=True)


def open_output(settings: ServeSettings) -> Output:
    """Send the log where the settings say: in a terminal to a new file, unless that can't be made, else to stderr."""

    def configure(fd: int | None = None) -> LineWriter:
        level, log_format = settings.log_level, settings.log_format
        if fd is None:
            return configure_logging(service="serve", level=level, log_format=log_format)
        return log_to(fd, service="serve", level=level, log_format=log_format)

    terminal = configure()
    # At its end the process waits for the log by itself, and loses what is still to be shown.
    atexit.register(terminal.drain, _LINES_BEFORE_S)
    if settings.verbose or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return Output(terminal, terminal)
    try:
        fd, name = tempfile.mkstemp(".log", f"{DIRECTORY_PREFIX}serve-")
    except OSError:
        return Output(terminal, terminal)
    return Output(terminal, configure(fd), Path(name))


def make_view(settings: ServeSettings, commands: Sequence[ServiceCommand], output: Output) -> ServeView:
    """The view of a cell that is about to start."""
    scheduler = next(command.address for command in commands if command.role == "scheduler")
    if output.log_path is None:
        return _LogView(settings, scheduler, output.terminal)
    return _ScreenView(settings, [command.name for command in commands], output, output.log_path)


class _LogView:
    """The view without a screen: the log says everything else."""

    def __init__(self, settings: ServeSettings, scheduler_address: str, writer: LineWriter) -> None:
        self._settings = settings
        self._scheduler_address = scheduler_address
        # A bar would not fit between JSON records.
        has_bar = settings.log_format == "text" and sys.stderr.isatty()
        self.display: Display = LogDisplay(writer.show if has_bar else None)

    async def wait(self, has_served: asyncio.Event) -> None:
        await has_served.wait()

    def announce(self) -> None:
        settings = self._settings
        http = f", HTTP on {settings.http_address}" if settings.http_address else ""
        places = f"{settings.bind_address}{http}, scheduler on {self._scheduler_address}"
        ready = f"ready: serving {settings.model_name} on {places}"
        print("\n".join([ready, *describe_http(settings)]), flush=True)

    def say_stopping(self) -> None:
        pass

    def say_stopped(self) -> None:
        pass


class _ScreenView:
    """The view on a terminal, with a line for each service until all are ready."""

    def __init__(self, settings: ServeSettings, names: Sequence[str], output: Output, log_path: Path) -> None:
        self._settings = settings
        self._terminal = output.terminal
        self._log_path = log_path
        self._screen = LaunchScreen(output.terminal.write, output.terminal.show, names)
        self._screen.say(f"starting {settings.model_name}; the log is {log_path}")

    @property
    def display(self) -> Display:
        return self._screen

    async def wait(self, has_served: asyncio.Event) -> None:
        served = asyncio.create_task(has_served.wait())
        try:
            while not served.done():
                self._screen.tick()
                await asyncio.wait({served}, timeout=_TICK_S)
        finally:
            served.cancel()

    def announce(self) -> None:
        self._terminal.drain(_LINES_BEFORE_S)
        print(
            "\n".join(
                [
                    *describe_model(self._settings.model_name, self._screen.model_facts),
                    *describe_room(self._screen.room_facts),
                    *self._places(),
                    *describe_http(self._settings),
                ]
            ),
            flush=True,
        )

    def say_stopping(self) -> None:
        limit = f"answers in flight may take {self._settings.drain_s:g} s, unless Ctrl-C comes again"
        self._screen.say(f"stopping; {limit}")

    def say_stopped(self) -> None:
        self._screen.say(f"stopped; the log is {self._log_path}")

    def _places(self) -> list[str]:
        settings = self._settings
        is_open = settings.insecure_bind is not None
        places = [("gRPC", f"{settings.bind_address}{', not encrypted' if is_open else ''}")]
        if settings.scheduler_listen is not None:
            places.append(("tokens", f"{settings.scheduler_listen}, the scheduler for clients that send token ids"))
        chat, generate = (f"`lockstep {command}{self._trust_flags()}`" for command in ("chat", "generate TEXT"))
        places.append(("next", f"{chat}, {generate} or `lockstep top`; Ctrl-C here stops it"))
        return [describe_place(name, text) for name, text in places]

    def _trust_flags(self) -> str:
        settings = self._settings
        if settings.tls_ca is None:
            return ""
        own = "" if settings.client_ca is None else " --tls-cert=FILE --tls-key=FILE"
        return f" --tls-ca={settings.tls_ca} --trust-domain={settings.trust_domain}{own}"
