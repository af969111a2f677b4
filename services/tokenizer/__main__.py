"""Run the tokenizer service: `python -m services.tokenizer --help`."""

from __future__ import annotations

import asyncio
import logging
import sys

from services.tokenizer.config import TokenizerSettings
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.metrics import make_registry
from services.tokenizer.request.model import ServedModel, load_model
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.server.servicer import TOKENIZER_SERVICE, TokenizerServicer
from shared.config import load_settings, log_settings
from shared.health import Health
from shared.lifecycle import StopRequest, freeze_garbage, run_service
from shared.logging import configure_logging
from shared.metrics import serve_metrics
from shared.model_dir import ModelDirectoryError
from shared.rpc import Servicer, make_server

logger = logging.getLogger(__name__)

# An encoding thread yields the interpreter lock to the event loop after this long; Python's default of 5 ms would be
# noticeable in streams.
SWITCH_INTERVAL_S = 200e-6

_CLOSE_S = 0.5


async def serve(settings: TokenizerSettings, model: ServedModel, stop: StopRequest) -> int:
    """Serve until `stop` is set and the streams are drained; returns the exit code."""
    health = Health((TOKENIZER_SERVICE,))

    async def on_link_change(is_linked: bool) -> None:
        await health.set_serving(is_linked and not stop.is_set())

    requests = CellRequests(settings.scheduler_lost_s)
    scheduler = SchedulerClient(
        settings.scheduler, model.digest, requests, on_link_change, silence_s=settings.scheduler_silence_s
    )
    live = LiveRequests()
    servicers: list[Servicer] = [TokenizerServicer(model, scheduler, live, settings.max_unread_s), health]
    names = (TOKENIZER_SERVICE,) if settings.reflection else ()
    try:
        server = make_server(settings.bind_address, servicers, service_names=names)
        metrics_server = await _serve_metrics(settings, scheduler)
    except RuntimeError as error:
        logger.error("cannot serve", extra={"address": settings.bind_address, "error": str(error)})
        return 1
    await server.start()
    logger.info("serving", extra={"address": settings.bind_address, "model": model.name})
    freeze_garbage()
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(scheduler.run())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await health.set_serving(False)
    # After a bug no answer can be finished.
    await live.drain(settings.drain_s if stop.is_set() else 0.0, stop.is_urgent)
    await server.stop(_CLOSE_S)
    if metrics_server is not None:
        metrics_server.close()
    model.structured_outputs.close()
    for task in ends:
        task.cancel()
    # The link only ends when it is cancelled; any other exception is a bug.
    for result in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return 0


async def _serve_metrics(settings: TokenizerSettings, scheduler: SchedulerClient) -> asyncio.AbstractServer | None:
    if settings.metrics_listen is None:
        return None
    try:
        return await serve_metrics(settings.metrics_listen, make_registry(scheduler))
    except RuntimeError as error:
        raise RuntimeError(f"--metrics-listen: {error}") from error


def main() -> int:
    """Entry point of the service."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = load_settings(TokenizerSettings)
    configure_logging(service="tokenizer", level=settings.log_level, log_format=settings.log_format)
    log_settings(settings)
    try:
        model = load_model(settings)
    except ModelDirectoryError as error:
        logger.error("cannot serve this model", extra={"error": str(error)})
        return 1
    return run_service(lambda stop: serve(settings, model, stop))


if __name__ == "__main__":
    sys.exit(main())
