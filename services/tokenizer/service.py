"""Starts and stops the tokenizer service."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry

from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.http.backend import Backend
from services.tokenizer.http.connections.limits import HttpLimits
from services.tokenizer.metrics import make_registry
from services.tokenizer.request.model import ServedModel, load_model
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.server.readiness import Readiness, find_bridging_s
from services.tokenizer.server.servicer import TOKENIZER_SERVICE, TokenizerServicer
from shared.config import load_settings, log_settings
from shared.model_files.model_dir import ModelDirectoryError
from shared.network.health import Health
from shared.network.management import serve_management
from shared.network.probes import Probes
from shared.network.rpc import MAX_CONNECTIONS, ServerLimits, Servicer, make_peer, make_server
from shared.network.tls import Role
from shared.process.lifecycle import ANSWERS_CUT, StopRequest, freeze_garbage, run_service
from shared.process.logging import configure_logging
from shared.process.open_files import share_open_files

if TYPE_CHECKING:
    from services.tokenizer.http.connections.server import HttpServer
    from services.tokenizer.tracing.exporter import OtlpTracer

logger = logging.getLogger(__name__)

# An encoding thread yields the interpreter lock to the event loop after this long; Python's default of 5 ms would be
# noticeable in streams.
SWITCH_INTERVAL_S = 200e-6

_CLOSE_S = 0.5
# How long the last spans may take to leave.
_FLUSH_S = 1.0


async def serve(
    settings: TokenizerSettings, model: ServedModel, stop: StopRequest, *, http_limits: HttpLimits | None = None
) -> int:
    """Serve until `stop` is set and the streams are drained; returns the exit code.

    `http_limits` are those of the settings if None.
    """
    health, probes = Health((TOKENIZER_SERVICE,)), Probes("starting", stuck=lambda: model.stuck)
    readiness = Readiness(
        health,
        probes,
        why_not_computed=lambda: scheduler.why_not_computed,
        bridging_s=lambda: find_bridging_s(settings.bridging_s, scheduler.worker_start_s),
    )
    requests = CellRequests(settings.scheduler_lost_s)
    scheduler = SchedulerClient(
        settings.scheduler,
        model.digest,
        requests,
        readiness.update,
        silence_s=settings.scheduler_silence_s,
        peer=make_peer(settings.certificates, Role.SCHEDULER),
    )
    live, totals = LiveRequests(), RequestTotals()
    limits, settings_http_limits = _share_limits(settings, totals)
    names = settings.served_model_name or (model.name,)
    tracer = None if settings.otlp_endpoint is None else _make_tracer(settings.otlp_endpoint, names[0], totals)
    servicer = TokenizerServicer(
        model, scheduler, live, totals=totals, max_unread_s=settings.max_unread_s, tracer=tracer
    )
    servicers: list[Servicer] = [servicer, health]
    try:
        server = make_server(
            settings.bind_address,
            servicers,
            service_names=(TOKENIZER_SERVICE,) if settings.reflection else (),
            certificates=settings.certificates,
            limits=limits,
        )
        registry = make_registry(scheduler, totals, model.prompts, settings.certificates, settings.keys)
        management = await serve_management(settings.manage_listen, registry, probes)
        backend = Backend(
            model,
            scheduler,
            live,
            totals,
            settings.max_unread_s,
            names,
            probes,
            settings.keys,
            tracer,
            settings.lenient_fields,
        )
        http = await _serve_http(settings, backend, registry, http_limits or settings_http_limits)
    except RuntimeError as error:
        logger.error("cannot serve", extra={"error": str(error)})
        return 1
    await readiness.update()
    await server.start()
    probes.set_started()
    logger.info("serving", extra={"address": settings.bind_address, "model": model.name})
    freeze_garbage()
    ends = [asyncio.create_task(task) for task in (stop.wait(), scheduler.run(), readiness.run())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await readiness.leave()
    num_cut = await _drain(settings.drain_s, scheduler, live, stop)
    await _stop(server, http, tracer)
    if management is not None:
        management.close()
    model.close()
    for task in ends:
        task.cancel()
    # The others only end when they are cancelled; any other exception is a bug.
    for result in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    if num_cut:
        # The last line, where the reader of the output looks first.
        facts = {"num_requests": num_cut, "drain_s": settings.drain_s}
        logger.error("answers in flight were cut: they did not finish in time", extra=facts)
    return ANSWERS_CUT if num_cut else 0


def _make_tracer(endpoint: str, model_name: str, totals: RequestTotals) -> OtlpTracer:
    # OpenTelemetry is an extra, and is not loaded where nothing is traced.
    from services.tokenizer.tracing.exporter import OtlpTracer  # noqa: PLC0415

    return OtlpTracer(endpoint, model_name, totals.spans)


def _share_limits(settings: TokenizerSettings, totals: RequestTotals) -> tuple[ServerLimits, HttpLimits]:
    """The limits of both ports."""
    num_http_connections = settings.max_http_connections if settings.http_address else 0
    num_connections, num_http_connections = share_open_files(MAX_CONNECTIONS, num_http_connections)
    limits = ServerLimits(
        max_connections=num_connections,
        max_connection_age_s=settings.max_connection_age_s,
        client_keys=settings.keys,
        on_refusal=totals.count_refusal,
    )
    return limits, HttpLimits(num_http_connections, max_unread_s=settings.max_unread_s)


async def _drain(drain_s: float, scheduler: SchedulerClient, live: LiveRequests, stop: StopRequest) -> int:
    """Returns how many requests were cut."""
    # After a bug no answer can be finished.
    if stop.is_set():
        scheduler.announce_drain()
    return await live.drain(drain_s if stop.is_set() else 0.0, stop.is_urgent)


async def _stop(server: grpc.aio.Server, http: HttpServer | None, tracer: OtlpTracer | None) -> None:
    """Answer nothing more, and export the spans of what was answered."""
    await server.stop(_CLOSE_S)
    if http is not None:
        await http.stop()
    if tracer is not None:
        await tracer.close(_FLUSH_S)


async def _serve_http(
    settings: TokenizerSettings, backend: Backend, registry: CollectorRegistry, limits: HttpLimits
) -> HttpServer | None:
    """Serve the HTTP API, if it has an address."""
    address = settings.http_address
    if address is None:
        return None
    # Its libraries are an extra, and not loaded where it is not served.
    from services.tokenizer.http.connections.access import Access  # noqa: PLC0415
    from services.tokenizer.http.connections.server import serve_http  # noqa: PLC0415
    from services.tokenizer.http.routes import make_app  # noqa: PLC0415

    access = Access(address, settings.http_allowed_hosts, settings.cors_origin)
    app = make_app(backend, access, registry, body_s=limits.body_s, max_requests=limits.max_connections)
    return await serve_http(address, app, certificates=settings.certificates, limits=limits)


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
    model.prompts.warm_up()
    return run_service(lambda stop: serve(settings, model, stop))
