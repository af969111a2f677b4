"""The page's files and their headers; `tests/integration/http/test_page.py` has it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

from services.tokenizer.http.page.files import PAGE_FILES
from tests.support.clients.key_files import key_line, write_keys
from tests.support.tokenizer.http_client import HttpService, run_http_service

KINDS = {"/": "text/html", "/lockstep/page.css": "text/css", "/lockstep/page.js": "text/javascript"}


async def test_a_browser_runs_nothing_but_the_pages_own_files(http: HttpService) -> None:
    assert KINDS.keys() == {"/", *PAGE_FILES}
    for path, kind in KINDS.items():
        answer = await http.get(path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert policy.pop("default-src") == "'none'"
        assert {name: value for name, value in policy.items() if value != "'none'"} == {
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "data:",
        }
        assert {"base-uri", "form-action", "frame-ancestors"} <= policy.keys()
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"


async def test_the_page_names_no_other_origin_and_writes_no_markup(http: HttpService) -> None:
    html, css, js = [(await http.get(path)).body.decode() for path in KINDS]
    places = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert {place for place in places if not place.startswith("data:")} == {"lockstep/page.css", "lockstep/page.js"}
    assert not re.search(r"<style|<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", html)
    assert "url(" not in css
    assert "@import" not in css
    assert not re.search(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function|import)\b", js)
    assert set(re.findall(r"https?://[^\"']*", html + css + js)) == {"http://www.w3.org/2000/svg"}
    ids = set(re.findall(r'id="([\w-]+)"', html))
    assert set(re.findall(r'byId\("([\w-]+)"\)', js)) <= ids, "what the script asks for is there"


async def test_with_keys_the_page_needs_none_and_says_that_the_api_does(model_dir: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", key_line("one"))
    async with run_http_service(model_dir, tmp_path, client_keys=keys) as http:
        assert [(await http.get(path)).status for path in KINDS] == [200] * len(KINDS)
        assert b'data-needs-key="true" data-has-state="true"' in (await http.get("/")).body
        # Whatever key a client sends, the page is the same.
        assert (await http.get("/", headers={"x-api-key": "unknown"})).status == 200
        assert (await http.get("/v1/models")).status == 401
