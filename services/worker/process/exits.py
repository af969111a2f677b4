"""How a process ends when its failure domain does: at once, from the RPC thread, whatever the main thread is in.

A rank inside a collective cannot be woken, and nobody repairs a communicator (DESIGN section 7, "Groups"): all
processes of the domain leave, and whoever supervises them starts them again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable

from services.worker.process.device_loop import DeviceLoop

logger = logging.getLogger(__name__)

# A partner that goes breaks our collective a moment before or after its goodbye.
_GOODBYE_S = 0.5
# For the job that runs while a partner stops: it may wait for that partner.
_STOP_GRACE_S = 1.0


class ExitCode(enum.IntEnum):
    """Why the process ended, beside 1 for what keeps it from serving at all."""

    STOPPED = 0
    LINK_LOST = 10
    STEP_FAILED = 11
    RANKS_DIFFER = 12
    RESTART = 13
    REFUSED = 14
    FAILPOINT = 15
    BUG = 16


def end_process(code: ExitCode, reason: str, **fields: object) -> None:
    """End the process now, without any clean-up. From any thread."""
    logger.log(logging.INFO if code is ExitCode.STOPPED else logging.ERROR, reason, extra={"exit_code": code, **fields})
    logging.shutdown()
    os._exit(code)


class DomainEnd:
    """Ends the process when a partner is lost, or has been asked to end. Belongs to the RPC thread's event loop.

    A process that was asked to end itself takes no loss of a partner for a failure.
    """

    def __init__(self, device: DeviceLoop, end: Callable[..., None] = end_process) -> None:
        """Stop `device` where there is time for it, and call `end` to end the process."""
        self._device = device
        self._end = end
        # Links inside the domain say goodbye then.
        self.stopping = asyncio.Event()

    def fail(self, code: ExitCode, reason: str, **fields: object) -> None:
        """End at once: the domain cannot go on."""
        self._end(ExitCode.STOPPED if self._device.is_stopping else code, reason, **fields)

    def fail_step(self, **fields: object) -> None:
        """A step failed, and the communicator is undefined: end, unless a partner tells in a moment that it stopped."""
        loop = asyncio.get_running_loop()
        loop.call_later(_GOODBYE_S, lambda: self.fail(ExitCode.STEP_FAILED, "a step failed", **fields))

    def stop(self, reason: str, **fields: object) -> None:
        """End as after a signal: a partner was asked to."""
        logger.info(reason, extra=fields)
        self._device.stop()
        self.stopping.set()
        asyncio.get_running_loop().call_later(_STOP_GRACE_S, self._end, ExitCode.STOPPED, "stopped inside a step")
