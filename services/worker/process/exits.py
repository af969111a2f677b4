"""How a process ends with its failure domain: at once, whatever the main thread is doing.

A rank inside a collective cannot be interrupted, nor a broken communicator repaired: all processes of the domain exit,
and their supervisor restarts them.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable

from services.worker.process.device_loop import DeviceLoop

logger = logging.getLogger(__name__)

# How long to wait for a goodbye after a broken collective: the cause may be a partner that was asked to end.
_GOODBYE_S = 0.5
# How long the running job may continue after a partner stopped; it may be waiting for that partner.
_STOP_GRACE_S = 1.0


class ExitCode(enum.IntEnum):
    """Why the process ended; 1 means that it could not begin to serve, and `ANSWERS_CUT` is a tokenizer's."""

    STOPPED = 0
    LINK_LOST = 10
    STEP_FAILED = 11
    RANKS_DIFFER = 12
    RESTART = 13
    REFUSED = 14
    FAILPOINT = 15
    BUG = 16


def end_process(code: ExitCode, reason: str, **fields: object) -> None:
    """End now, without clean-up. From any thread."""
    level = logging.INFO if code is ExitCode.STOPPED else logging.ERROR
    try:
        logger.log(level, reason, extra={"exit_code": code, **fields})
        logging.shutdown()
    finally:
        # The process ends even if there is no memory left to say why.
        os._exit(code)


class DomainEnd:
    """Ends the process when a partner is lost or asked to end. Belongs to the RPC thread's event loop.

    Losing a partner is no failure if this process was asked to end.
    """

    def __init__(self, device: DeviceLoop, end: Callable[..., None] = end_process) -> None:
        self._device = device
        self._end = end
        # Once it is set, heartbeats inside the domain and to the scheduler say so.
        self.leaving = asyncio.Event()
        # Once it is set, links inside the domain say goodbye.
        self.stopping = asyncio.Event()

    def fail(self, code: ExitCode, reason: str, **fields: object) -> None:
        """End at once: the domain cannot continue."""
        self._end(ExitCode.STOPPED if self._device.is_stopping else code, reason, **fields)

    def fail_step(self, **fields: object) -> None:
        """End after a failed step or epoch, unless a partner says goodbye in a moment: its end was then the cause."""
        loop = asyncio.get_running_loop()
        loop.call_later(
            _GOODBYE_S, lambda: self.fail(ExitCode.STEP_FAILED, "a step or the start of an epoch failed", **fields)
        )

    def leave(self, reason: str, **fields: object) -> None:
        """The domain was asked to end: its leaders let the scheduler drain it. Another call changes nothing."""
        if not self.leaving.is_set():
            logger.info(reason, extra=fields)
            self.leaving.set()

    def stop(self, reason: str, **fields: object) -> None:
        """End as planned: after a drain, with a partner that ends, or because a second signal asks for it."""
        logger.info(reason, extra=fields)
        self._device.stop()
        self.stopping.set()
        asyncio.get_running_loop().call_later(_STOP_GRACE_S, self._end, ExitCode.STOPPED, "stopped during a step")
