"""Serves the page: three files, which need nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aiohttp import web

# Scripts and styles come from their files alone; the icon is in the HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FOLDER = Path(__file__).parent
_STATIC = {"/lockstep/page.css": "text/css", "/lockstep/page.js": "text/javascript"}


class Page:
    """The page's routes. It has nothing of the cell: its script asks the API, as any client."""

    def __init__(self, *, needs_key: bool, has_state: Callable[[web.Request], bool]) -> None:
        """Read the files.

        Args:
            needs_key: Whether clients need keys.
            has_state: Whether one that loads the page may ask for the cell's state, if its key is an operator's.
        """
        self._html = _read("page.html").replace("{needs_key}", str(needs_key).lower())
        self._has_state = has_state

    def routes(self) -> list[web.RouteDef]:
        """The routes of all files."""
        return [web.get("/", self._page), *(_static(path, kind) for path, kind in _STATIC.items())]

    async def _page(self, request: web.Request) -> web.StreamResponse:
        html = self._html.replace("{has_state}", str(self._has_state(request)).lower())
        return _answer(html, "text/html")


def _static(path: str, content_type: str) -> web.RouteDef:
    text = _read(path.rpartition("/")[2])

    async def serve(_request: web.Request) -> web.StreamResponse:
        return _answer(text, content_type)

    return web.get(path, serve)


def _answer(text: str, content_type: str) -> web.Response:
    return web.Response(text=text, content_type=content_type, headers=_HEADERS)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
