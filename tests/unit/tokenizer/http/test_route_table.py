"""The app, the API's description and the document have the routes of the table, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.http.answer_schemas import ANSWERS, STATE
from services.tokenizer.http.backend import Backend
from services.tokenizer.http.connections.access import Access
from services.tokenizer.http.connections.clients import Audience
from services.tokenizer.http.openapi import make_openapi
from services.tokenizer.http.reading.readers import FIELDS
from services.tokenizer.http.route_table import NOT_SUPPORTED, ROUTES
from services.tokenizer.http.routes import make_app
from services.tokenizer.request.model import load_model
from services.tokenizer.server.live_requests import LiveRequests
from shared.network.probes import Probes
from tests.support.clients.key_files import key_line, write_keys
from tests.support.tables.routes_table import BEGIN, END, ROUTES_FILE, render_table, with_table

EVERY_METHOD = frozenset({"*"})


async def ignore() -> None:
    """Nothing follows the link."""


async def make_real_app(model_dir: Path, keys_file: Path | None) -> web.Application:
    """The app of a service that is not linked to a cell."""
    settings = TokenizerSettings(
        model_dir=model_dir, scheduler=("unix:none",), listen="unix:none", client_keys=keys_file
    )
    model = load_model(settings)
    scheduler = SchedulerClient(("unix:none",), model.digest, CellRequests(0.0), ignore, silence_s=1.0)
    backend = Backend(
        model, scheduler, LiveRequests(), RequestTotals(), 1.0, ("tiny",), Probes(""), client_keys=settings.keys
    )
    access = Access("unix:none", (), ())
    app = make_app(backend, access, CollectorRegistry(), body_s=1.0, max_requests=8)
    model.close()
    return app


@pytest.mark.parametrize("has_keys", [False, True])
async def test_the_app_serves_the_table(model_dir: Path, tmp_path: Path, *, has_keys: bool) -> None:
    app = await make_real_app(model_dir, write_keys(tmp_path / "keys", key_line("one")) if has_keys else None)
    served = {
        (resource.canonical, frozenset(route.method for route in resource)) for resource in app.router.resources()
    }
    expected = {
        (route.path, frozenset({"GET", "HEAD"} if route.method == "GET" else {route.method}))
        for route in ROUTES
        if not (has_keys and route.audience is Audience.ALL_OR_NONE)
    }
    assert served == expected | {(path, EVERY_METHOD) for path in NOT_SUPPORTED}
    assert len(app.router.resources()) == len(served)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("has_keys", [False, True])
def test_the_description_has_the_table(*, has_keys: bool, has_state: bool) -> None:
    paths = make_openapi("1", needs_keys=has_keys, has_state=has_state)["paths"]
    hidden = {Audience.ALL_OR_NONE} if has_keys else set()
    hidden |= set() if has_state else {Audience.OPERATORS}
    expected = {
        route.path: {route.method.lower()} for route in ROUTES if route.is_described and route.audience not in hidden
    }
    assert {path: set(methods) for path, methods in paths.items()} == expected


def test_the_document_is_up_to_date() -> None:
    document = ROUTES_FILE.read_text(encoding="utf-8")
    assert with_table(document, render_table()) == document, "run `make routes`"


def test_the_document_names_every_route_once() -> None:
    table = render_table()
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    named = [name for row in rows for name in row.replace("GET ", "").replace("POST ", "").split("`")[1::2]]
    assert sorted(named) == sorted([*(route.path for route in ROUTES), *NOT_SUPPORTED])


@pytest.mark.parametrize("document", ["", BEGIN, END, END + BEGIN, BEGIN + END + BEGIN + END])
def test_a_document_without_the_marks_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="marks"):
        with_table(document, "")


def test_rows_are_consistent() -> None:
    paths = [*(route.path for route in ROUTES), *NOT_SUPPORTED]
    assert len(paths) == len(set(paths))
    for route in ROUTES:
        assert (route.method == "POST") is (route.read is not None), route.path
        assert route.read is None or route.read in FIELDS, route.path
        assert route.answer is None or route.answer in {**ANSWERS, "State": STATE}, route.path
        assert route.summary, route.path
    assert {route.read for route in ROUTES} - {None} == set(FIELDS), "a body that no route reads"
    unused = set(ANSWERS) - {route.answer for route in ROUTES} - {"Error", "MessageError"}
    assert not unused, "an answer that no route has"
