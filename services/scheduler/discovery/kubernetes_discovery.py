"""Finds workers by the EndpointSlices of a Kubernetes Service, which another process watches."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

from pydantic import ValidationError

from services.scheduler.discovery.last_seen import LastSeen, OnFound
from services.scheduler.discovery.watch_messages import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    MAX_LINE_BYTES,
    WatchMessage,
    WatchTask,
)
from shared.backoff import Backoff
from shared.process.parent import leave_end_to_parent

logger = logging.getLogger(__name__)

_MODULE = "services.scheduler.discovery.slice_watch"
# A process that is this long silent beyond its period and its longest delay hangs.
_PATIENCE_S = 60.0


class KubernetesDiscovery:
    """Starts a watching process again whenever it ends; its last report counts meanwhile."""

    def __init__(self, task: WatchTask, last_seen: LastSeen) -> None:
        self._task = task
        self._last_seen = last_seen
        self._silence_s = task.period_s + MAX_DELAY_S + _PATIENCE_S
        self._problem = ""

    async def run(self, on_found: OnFound) -> None:
        """Report each new set of endpoints, until cancelled."""
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while True:
            seen_at = self._last_seen.seen_at
            problem = await self._watch(on_found)
            if self._last_seen.seen_at > seen_at:
                backoff.reset()
            delay_s = backoff.next_delay_s()
            logger.error("the process that watches Kubernetes ended", extra={"problem": problem, "delay_s": delay_s})
            await asyncio.sleep(delay_s)

    async def _watch(self, on_found: OnFound) -> str:
        """Run a watching process to its end; returns why it ended."""
        # Not through the event loop: uvloop forks, and gRPC's fork handlers kill one child in twenty. This blocks for a
        # millisecond. No proxies from the environment.
        with leave_end_to_parent():
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", _MODULE, self._task.model_dump_json()],
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        try:
            return await self._read(process, on_found)
        finally:
            process.kill()
            # It is killed, so this takes no time.
            process.wait()

    async def _read(self, process: subprocess.Popen[bytes], on_found: OnFound) -> str:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    line = await reader.readline()
                if not line.endswith(b"\n"):
                    return "its output ended"
                self._take(WatchMessage.model_validate_json(line), loop.time(), on_found)
        except TimeoutError:
            return "it is silent"
        except ValidationError as error:
            return f"its message is not valid: {error.errors(include_input=False)[0]['msg']}"
        except ValueError as error:
            return f"its message is not valid: {error}"
        finally:
            transport.close()

    def _take(self, message: WatchMessage, now: float, on_found: OnFound) -> None:
        endpoints = message.found()
        if endpoints is not None:
            self._last_seen.note(endpoints, now, on_found)
        if message.problem and message.problem != self._problem:
            self._problem = message.problem
            logger.warning("endpoints are not watched: the last known ones stay", extra={"problem": message.problem})
        elif message.is_watched and self._problem:
            self._problem = ""
            logger.info("endpoints are watched again")
