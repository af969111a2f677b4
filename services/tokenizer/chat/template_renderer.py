"""Renders chats in child processes, so that one that costs too much ends only itself."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.render_server import ChildEndedError, RenderChild, RenderServer
from services.tokenizer.chat.template_rendering import RenderError
from services.tokenizer.chat.template_trial import refusal, try_template
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.text_size import check_text_bytes
from services.tokenizer.trial_limits import cpu_problem, wall_clock_s, was_out_of_cpu
from shared.errors import QueueFullError
from shared.limited_log import LimitedLog

logger = logging.getLogger(__name__)

_RETRY_DELAY_S = 1.0


class Renderer(Protocol):
    """Renders templates."""

    @property
    def num_ended(self) -> Mapping[str, int]:
        """How many renders were ended, by their cause."""

    def try_template(self, source: str) -> TemplateFeatures:
        """Try a template before it is rendered.

        Raises:
            ModelDirectoryError: it fails; see `template_trial`.
        """

    def render(self, source: str, fields: JsonObject, *, opens_turn: bool) -> str:
        """Render `fields`, with the assistant's turn opened at the end if `opens_turn`. Slow; thread-safe.

        Raises:
            RenderError: the template rejects the conversation, fails on it, or exceeds a limit.
            RequestTooLargeError: it writes too much.
        """

    @property
    def max_render_s(self) -> float:
        """The longest that a render can take, in seconds."""

    def warm_up(self, num_renders: int) -> None:
        """Prepare for as many renders at once, without waiting; only from a thread that lasts."""

    def close(self) -> None:
        """Render nothing any more."""


class RendererMaker(Protocol):
    """Makes a renderer."""

    def __call__(self, sources: Mapping[str, bool], special_tokens: Mapping[str, str], /, *, cpu_s: float) -> Renderer:
        """Make it for the sources of templates; a render gets `cpu_s` seconds of CPU time."""


class TemplateRenderer:
    """Renders with children of one server, which starts on demand; and again, should it end.

    A child belongs to the thread that uses it until it has answered or reached a limit, whatever has become of the
    call. It then serves another one, or another child takes its place. So there are never more than threads that render
    at once, and those that were warmed up.

    Attributes:
        num_ended: Renders that were ended, by each cause: `cpu` and `memory` at a limit, `crash` for a child that
            ended itself, `hung` for one that did not answer, and `lost` for one that was killed from outside.
    """

    def __init__(self, sources: Mapping[str, bool], special_tokens: Mapping[str, str], *, cpu_s: float) -> None:
        """Keep the templates; nothing is started yet.

        Args:
            sources: The templates, and whether each is for conversations with tools only.
            special_tokens: Their names, such as `bos_token`, and texts.
            cpu_s: CPU seconds that a render may take.
        """
        self._sources = dict(sources)
        self._setup = {"sources": list(sources), "special_tokens": dict(special_tokens), "cpu_s": cpu_s}
        self._cpu_s = cpu_s
        self._idle: deque[RenderChild] = deque()
        self._server: RenderServer | None = None
        self._is_closed = False
        # The lock of the two above.
        self._lock = threading.Lock()
        self._log = LimitedLog(logger)
        self.num_ended = dict.fromkeys(("cpu", "memory", "crash", "hung", "lost"), 0)

    @property
    def max_render_s(self) -> float:
        """The longest that a render can take, in seconds."""
        # Two children, each of which may be waited for, and another server.
        return 3 * wall_clock_s(self._cpu_s)

    def try_template(self, source: str) -> TemplateFeatures:
        """See `Renderer`: the server then forks those that render too; it ends with the thread that has started it."""
        try:
            child = self._fork()
        except OSError:
            raise refusal("the trial process did not start") from None
        with contextlib.closing(child):
            place, has_tools = list(self._sources).index(source), self._sources[source]
            return try_template(child, place, timeout_s=self._cpu_s, has_tools=has_tools)

    def warm_up(self, num_renders: int) -> None:
        """See `Renderer`: the server ends with the thread that has started it."""
        for _ in range(num_renders):
            self._add_idle()

    def render(self, source: str, fields: JsonObject, *, opens_turn: bool = True) -> str:
        """See `Renderer`.

        Raises:
            QueueFullError: the machine was too busy to render it.
            RuntimeError: two children in a row were killed, not by their limits.
        """
        place = list(self._sources).index(source)
        request = {"kind": "render", "source": place, "fields": fields, "opens_turn": opens_turn}
        answer = self._ask(request)
        if "problem" in answer:
            if answer["type"] == "MemoryError":
                self._count_ended("memory")
            raise RenderError(answer["problem"], answer["type"])
        if "num_bytes" in answer:
            check_text_bytes(answer["num_bytes"])
        return str(answer.get("text", ""))

    def close(self) -> None:
        """Kill the server and its children."""
        self._end_server(for_good=True)
        while self._idle:
            self._idle.pop().close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._ask_child(self._take_idle() or self._fork(), request)
        except ChildEndedError as error:
            # Rendering has no effects, and an idle child may have ended long ago, perhaps all of them.
            self._count_ended("lost", code=error.code)
        try:
            return self._ask_child(self._fork(), request)
        except ChildEndedError as error:
            self._count_ended("lost", code=error.code)
            raise RuntimeError("two rendering processes were killed") from None

    def _ask_child(self, child: RenderChild, request: dict[str, Any]) -> dict[str, Any]:
        """The answer; the child is idle again, or replaced.

        Raises:
            ChildEndedError: it was killed from outside.
            RenderError: it was killed at the limit of its CPU time, or crashed.
            QueueFullError: it did not answer; perhaps the machine is too busy.
        """
        try:
            answer = child.ask(request, wall_clock_s(self._cpu_s))
        except ChildEndedError as error:
            child.close()
            if error.code is None or error.code == -signal.SIGKILL:
                raise
            self._add_idle()
            raise self._failure(error.code) from None
        except TimeoutError:
            child.close()
            # A server that does not run forks no more children.
            self._end_server()
            self._count_ended("hung")
            raise QueueFullError("rendering the chat took too long", retry_delay_s=_RETRY_DELAY_S) from None
        if child.is_usable:
            self._idle.append(child)
        else:
            child.close()
            self._add_idle()
        return answer

    def _failure(self, code: int) -> RenderError:
        if was_out_of_cpu(code):
            self._count_ended("cpu")
            return RenderError(f"the chat template failed: {cpu_problem(self._cpu_s)}", "SIGPROF")
        # Some libraries end the process where there is no memory left.
        self._count_ended("crash", code=code)
        return RenderError("the chat template failed", f"exit code {code}")

    def _take_idle(self) -> RenderChild | None:
        try:
            # The last one used: those at the other end may still be getting ready.
            return self._idle.pop()
        except IndexError:
            return None

    def _add_idle(self) -> None:
        try:
            child = self._fork()
        except OSError as error:
            # The next chat tries again.
            logger.warning("a rendering process cannot be started", extra={"error": str(error)})
            return
        for place, has_tools in enumerate(self._sources.values()):
            child.begin({"kind": "warm", "source": place, "has_tools": has_tools})
        self._idle.appendleft(child)

    def _fork(self) -> RenderChild:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("nothing is rendered any more")
            if self._server is not None:
                try:
                    return self._server.fork(self._setup)
                except (ConnectionError, TimeoutError) as error:
                    logger.warning("the server of rendering processes is replaced", extra={"error": str(error)})
                    self._server.close()
            self._server = RenderServer()
            return self._server.fork(self._setup)

    def _end_server(self, *, for_good: bool = False) -> None:
        with self._lock:
            self._is_closed = self._is_closed or for_good
            if self._server is not None:
                self._server.close()
                self._server = None

    def _count_ended(self, cause: str, **details: object) -> None:
        self.num_ended[cause] += 1
        self._log.warning("rendering a chat was ended", kind=cause, cause=cause, **details)
