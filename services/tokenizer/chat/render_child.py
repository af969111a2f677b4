"""What a forked process does: it renders templates for one connection, within limits that the kernel holds.

The first message is the setup: the sources of the templates, their special tokens, and the CPU seconds that a render
may take. Each further one is a request, and has one answer, and after it a text of as many bytes as that says. A trial
has the same limits as a chat.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import asdict, replace
from typing import Any

from services.tokenizer.chat.template_features import find_features, find_opening, sample_tools
from services.tokenizer.chat.template_rendering import explain_failure, read_variables, render_template
from services.tokenizer.forks.frames import receive_frame, send_frame
from services.tokenizer.forks.memory_limit import MemoryLimit
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.text_size import MAX_TEXT_BYTES
from services.tokenizer.trial_limits import limit_cpu

MAX_MEMORY_BYTES = 256 * 1024 * 1024
"""Memory above what is mapped when the process begins."""

MEMORY_PROBLEM = f"it takes more than {MAX_MEMORY_BYTES // 2**20} MiB of memory"

# A rendered text may have characters that are taken out again, which break control tokens.
_MAX_RENDERED_BYTES = 4 * MAX_TEXT_BYTES

_MAX_ERROR_LENGTH = 500


def serve_renders(connection: socket.socket) -> None:
    """Answer until the connection is closed, or an answer says that it `is_last`. Limits this process for good."""
    memory = MemoryLimit(MAX_MEMORY_BYTES)
    setup = receive_frame(connection)
    if setup is None:
        return
    templates = _Templates(setup["sources"], setup["special_tokens"], setup["cpu_s"])
    while (request := receive_frame(connection)) is not None:
        text = b""
        try:
            answer = templates.answer(request)
            # As JSON, megabytes of text would hold the service's interpreter.
            text = answer.pop("text", b"")
            is_last = memory.is_half_used
        except MemoryError:
            answer, is_last = {"problem": f"the chat template failed: {MEMORY_PROBLEM}", "type": "MemoryError"}, True
        limit_cpu(0.0)
        send_frame(connection, {**answer, "num_text_bytes": len(text), "is_last": is_last})
        connection.sendall(text)
        if is_last:
            return


def warm_up() -> None:
    """Import what is only imported when a template is first compiled and rendered."""
    render_template("{{ messages }}", {}, {"messages": [], "tools": None})


class _Templates:
    """Answers requests; after each, the limit of CPU time is still on."""

    def __init__(self, sources: list[str], special_tokens: dict[str, str], cpu_s: float) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._cpu_s = cpu_s

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        limit_cpu(self._cpu_s)
        source = self._sources[request["source"]]
        match request["kind"]:
            case "render":
                return self._render(source, request["fields"], opens_turn=request["opens_turn"])
            case "warm":
                return self._warm(source, has_tools=request["has_tools"])
            case _:
                return self._try(source, has_tools=request["has_tools"])

    def _render(self, source: str, fields: JsonObject, *, opens_turn: bool) -> dict[str, Any]:
        try:
            text = render_template(source, self._special_tokens, fields, opens_turn=opens_turn)
            encoded = text.encode()
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            failure = explain_failure(error, source)
            return {"problem": str(failure), "type": failure.error_type}
        return {"num_bytes": len(encoded)} if len(encoded) > _MAX_RENDERED_BYTES else {"text": encoded}

    def _warm(self, source: str, *, has_tools: bool) -> dict[str, Any]:
        """Compile a template, by what it has rendered in its trial; if that fails now, a chat will say so."""
        with contextlib.suppress(Exception):
            find_opening(lambda fields: self._in_time(source, fields), sample_tools() if has_tools else None)
        return {}

    def _try(self, source: str, *, has_tools: bool) -> dict[str, Any]:
        try:
            tools = sample_tools() if has_tools else None
            features = find_features(lambda fields: self._in_time(source, fields), tools)
            limit_cpu(self._cpu_s)
            return {"features": asdict(replace(features, variables=read_variables(source)))}
        except MemoryError:
            return {"error": MEMORY_PROBLEM}
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]}

    def _in_time(self, source: str, fields: JsonObject) -> str:
        limit_cpu(self._cpu_s)
        return render_template(source, self._special_tokens, fields)
