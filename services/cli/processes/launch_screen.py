"""What a person sees of `lockstep serve` in a terminal, while the log goes to a file.

    starting smollm2-135m-instruct; the log is /tmp/lockstep-serve-x.log
      worker     ready after 4.1 s
      scheduler  ready after 1.0 s
      tokenizer  ready after 1.6 s
    serving smollm2-135m-instruct: weights int8, computing in bfloat16, native kernels on avx512_bf16, 8 threads
      gRPC       127.0.0.1:50051
      next       `lockstep chat`, `lockstep generate TEXT` or `lockstep top`; Ctrl-C here stops it
      page       http://127.0.0.1:8000/
      base URL   http://127.0.0.1:8000/v1 with any key; http://127.0.0.1:8000 for Anthropic's libraries
      try        curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d ...

All but the last lines appear one by one; below them is a bar, or what is still waited for.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from services.cli.processes.display import Display
from services.cli.processes.loading_bar import LoadingBar

_MARKS = "|/-\\"
_WIDTH = 9

# The line about the model that `services/worker/runner/start/number_formats.py` logs, as text and as JSON.
_LOADED = b"the model is loaded"
# The line about the context that `services/worker/server/context_room.py` logs.
_LESS_ROOM = b"the KV cache holds less than the context"
_FIELDS = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")


class LaunchScreen(Display):
    """See `Display`. A role has a line once all its processes serve; later, each exit and each restart has one."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        show: Callable[[str], None],
        names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing has been started yet.

        Args:
            write: Takes whole lines.
            show: Keeps a text below all lines; an empty one removes it.
            names: The processes'; the first word is the role.
            clock: Returns seconds.
        """
        self._write = write
        self._show = show
        self._clock = clock
        self._begun_at = clock()
        self._role_to_starting = {
            _role_of(name): {one for one in names if _role_of(one) == _role_of(name)} for name in names
        }
        self._role_to_number = {role: len(some) for role, some in self._role_to_starting.items()}
        self._bar = LoadingBar(self._set_bar)
        self._bar_text = ""
        self._num_ticks = 0
        self._has_ended = False
        self.model_facts: Mapping[str, str] = {}
        """The fields of a worker's line about its model; empty before there is one."""
        self.room_facts: Mapping[str, str] = {}
        """The fields of the worker's line with the least room, where the KV cache holds less than the context."""

    def say(self, line: str) -> None:
        """Write a line. It covers the ^C that a terminal shows for an interrupt."""
        self._write(f"\r{line}\n".encode(errors="backslashreplace"))

    def tick(self) -> None:
        """Show that time passes; about once a second."""
        self._num_ticks += 1
        self._draw()

    @override
    def take(self, name: str, line: bytes) -> bool:
        # The log has every line.
        self._bar.take(name, line)
        if _LOADED in line:
            self.model_facts = _parse_fields(line, _LOADED) or self.model_facts
        if _LESS_ROOM in line:
            self.room_facts = min(
                (facts for facts in (self.room_facts, _parse_fields(line, _LESS_ROOM)) if facts),
                key=lambda facts: int(facts.get("request_tokens", 0)),
                default={},
            )
        return False

    @override
    def on_start(self, name: str) -> None:
        pass

    @override
    def on_ready(self, name: str) -> None:
        role = _role_of(name)
        if role not in self._role_to_starting:
            self.say(f"the {name} is ready again")
            return
        self._role_to_starting[role].discard(name)
        if not self._role_to_starting[role]:
            del self._role_to_starting[role]
            number = self._role_to_number[role]
            who = role if number == 1 else f"{number} {role}s"
            self.say(f"  {who:<{_WIDTH}}  ready after {self._clock() - self._begun_at:.1f} s")
        self._draw()

    @override
    def on_exit(self, name: str, reason: str | None, delay_s: float | None) -> None:
        self._bar.drop(name)
        if delay_s is not None:
            self._begun_at = self._clock()
            when = f" in {delay_s:g} s" if delay_s else ""
            self.say(f"{reason or f'the {name} ended'}; it restarts{when}")

    @override
    def end(self) -> None:
        self._has_ended = True
        self._bar.end()
        self._draw()

    def _set_bar(self, text: str) -> None:
        self._bar_text = text
        self._draw()

    def _draw(self) -> None:
        status = "" if self._has_ended else self._status()
        # A longer line would not be erased as a whole.
        self._show(status[: shutil.get_terminal_size().columns - 1])

    def _status(self) -> str:
        what = self._bar_text or (
            self._role_to_starting and f"waiting for the {' and the '.join(self._role_to_starting)}"
        )
        if not what:
            return ""
        return f"{_MARKS[self._num_ticks % len(_MARKS)]} {what}, {self._clock() - self._begun_at:.0f} s"


def describe_model(model: str, facts: Mapping[str, str]) -> list[str]:
    """Lines that say which model is served, and what it computes in if `facts` of a worker are known."""
    if not facts.keys() >= {"weights", "dtype", "backend", "instructions", "threads"}:
        return [f"serving {model}"]
    kernels = f"{facts['backend']} kernels on {facts['instructions']}"
    formats = f"weights {facts['weights']}, computing in {facts['dtype']}"
    lines = [f"serving {model}: {formats}, {kernels}, {facts['threads']} threads"]
    return [*lines, describe_place("faster", facts["faster"])] if "faster" in facts else lines


def describe_room(facts: Mapping[str, str]) -> list[str]:
    """A line that says how long a request may be, if `facts` of a worker say that it is less than the context."""
    if not facts.keys() >= {"request_tokens", "context_length", "whole_context"}:
        return []
    room = f"a request gets {facts['request_tokens']} of {facts['context_length']} tokens"
    return [describe_place("context", f"{room}; all with --worker.{facts['whole_context'].removeprefix('--')}")]


def describe_place(name: str, text: str) -> str:
    """A line below the first one: where something is, or what it is."""
    return f"  {name:<{_WIDTH}}  {text}"


def _role_of(name: str) -> str:
    return name.partition(" ")[0]


def _parse_fields(line: bytes, message: bytes) -> Mapping[str, str]:
    text = line.decode(errors="replace")
    if not text.startswith("{"):
        return dict(_FIELDS.findall(text.partition(message.decode())[2]))
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return {name: str(value) for name, value in record.items()}
