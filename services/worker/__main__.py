"""The worker process: RPC on its own thread, device work on the main thread."""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from services.worker.config import WorkerSettings
from services.worker.device import DeviceError
from services.worker.group.meeting import NotMetError
from services.worker.group.member import Member
from services.worker.parallel.rendezvous import PartnerLostError
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.exits import DomainEnd, ExitCode, end_process
from services.worker.process.loading_progress import make_progress
from services.worker.process.private_home import make_home_private
from services.worker.process.rpc_thread import Role, RpcThread
from services.worker.process.signals import call_at_stop_signals
from services.worker.server.leader import Leader
from shared.config import load_settings, log_settings
from shared.model_files.model_dir import ModelDirectoryError
from shared.process.lifecycle import freeze_garbage, ignore_stop_signals
from shared.process.logging import configure_logging

if TYPE_CHECKING:
    from services.worker.parallel.rendezvous import Rendezvous
    from services.worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# How long one thread may hold the interpreter while the other waits. CPython's default of 5 ms would slow every step.
_SWITCH_INTERVAL_S = 200e-6
# Time for the loading to notice that it should stop.
_LOADING_STOP_S = 2.0


class _LoadingStoppedError(Exception):
    """A stop signal arrived."""


def main() -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    settings = load_settings(WorkerSettings)
    configure_logging(service="worker", level=settings.log_level, log_format=settings.log_format)
    log_settings(settings)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    prepare_imports()
    device, is_loaded = DeviceLoop(), threading.Event()
    end = DomainEnd(device)
    make_role = Leader if settings.layout.is_leader else Member
    role: Role = make_role(settings, device, end)
    rpc = RpcThread(
        settings.bind_address,
        role,
        end,
        reflection=settings.reflection,
        manage_listen=settings.manage_listen,
        certificates=settings.certificates,
    )
    call_at_stop_signals(lambda: _stop(device, rpc, is_loaded), rpc.end)
    try:
        rpc.start()
    except RuntimeError as error:
        logger.error("cannot serve", extra={"error": str(error)})
        return 1
    try:
        return _serve(settings, device, rpc, is_loaded)
    finally:
        rpc.stop()
        ignore_stop_signals()


def _stop(device: DeviceLoop, rpc: RpcThread, is_loaded: threading.Event) -> None:
    """Leave the failure domain. Before it is complete, stop; if loading does not, end: other ranks may never come."""
    if rpc.try_leave():
        return
    device.stop()
    if not is_loaded.wait(_LOADING_STOP_S):
        end_process(ExitCode.STOPPED, "stopped while loading")


def _serve(settings: WorkerSettings, device: DeviceLoop, rpc: RpcThread, is_loaded: threading.Event) -> int:
    # Others ask as soon as it listens, long before torch is imported.
    meeting = rpc.meet()
    try:
        runner = _load(settings, device, meeting)
    except _LoadingStoppedError:
        return 0
    except NotMetError as error:
        logger.error(str(error))
        return 1
    except (DeviceError, ModelDirectoryError, PartnerLostError) as error:
        logger.error("cannot load the model", extra={"error": str(error)})
        return 1
    finally:
        is_loaded.set()
    freeze_garbage()
    rpc.announce(runner)
    device.run()
    logger.info("stopped")
    return 0


def _load(settings: WorkerSettings, device: DeviceLoop, meeting: Future[Rendezvous | None]) -> ModelRunner:
    # torch takes seconds to import: settings, OpenMP and health checks must not wait for it.
    from services.worker.runner.start.build import build_model_runner  # noqa: PLC0415

    progress = make_progress(sys.stderr, log_format=settings.log_format)

    def on_progress(part: float) -> None:
        if device.is_stopping:
            raise _LoadingStoppedError
        progress(part)

    try:
        return build_model_runner(settings, on_progress, meeting.result())
    finally:
        progress.close()


def prepare_imports() -> None:
    """Do what must be done before torch is imported."""
    _tune_libraries()
    make_home_private()


def _tune_libraries() -> None:
    """Set defaults for environment variables that torch and OpenMP read once, when loaded.

    Idle OpenMP threads sleep, to leave cores to others. Waking one costs as much as the few microseconds between
    kernels, so GNU's library spins that long first (10 to 20 % more tokens per second on 2 cores). Huge pages for large
    tensors make a decode step, which reads all weights, 7 % faster.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


if __name__ == "__main__":
    sys.exit(main())
