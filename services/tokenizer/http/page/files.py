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
PAGE_FILES = {"/lockstep/page.css": "text/css", "/lockstep/page.js": "text/javascript"}
"""The types of what the page asks for, by their routes."""


class Page:
    """The page and its files. It has nothing of the cell: its script asks the API, as any client."""

    def __init__(self, *, needs_key: bool, has_state: Callable[[web.Request], bool]) -> None:
        """Read the files.

        Args:
            needs_key: Whether clients need keys.
            has_state: Whether one that loads the page may ask for the cell's state, if its key is an operator's.
        """
        self._html = _read("page.html").replace("{needs_key}", str(needs_key).lower())
        self._has_state = has_state
        self._files = {path: _read(path.rpartition("/")[2]) for path in PAGE_FILES}

    def html(self, request: web.Request) -> web.Response:
        """The page itself."""
        html = self._html.replace("{has_state}", str(self._has_state(request)).lower())
        return _answer(html, "text/html")

    def file(self, path: str) -> web.Response:
        """One of `PAGE_FILES`."""
        return _answer(self._files[path], PAGE_FILES[path])


def _answer(text: str, content_type: str) -> web.Response:
    return web.Response(text=text, content_type=content_type, headers=_HEADERS)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
