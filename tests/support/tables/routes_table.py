"""The table of routes in protos/README.md, generated from the table that the app is made of: `make routes`."""

from __future__ import annotations

from services.tokenizer.http.connections.clients import Audience
from services.tokenizer.http.route_table import NOT_SUPPORTED, ROUTES, Route
from tests.support.system.processes import ROOT
from tests.support.tables.generated_tables import replace_tables

ROUTES_FILE = ROOT / "protos" / "README.md"
BEGIN = "<!-- Made by `make routes`: change services/tokenizer/http/route_table.py instead. -->\n"
END = "<!-- The end of what `make routes` makes. -->\n"

_KEYS = {
    Audience.CLIENTS: "a client's",
    Audience.EVERYBODY: "none",
    Audience.OPERATORS: "an operator's",
    Audience.ALL_OR_NONE: "there is no such route then",
}


def main() -> None:
    """Bring protos/README.md up to date."""
    ROUTES_FILE.write_text(with_table(ROUTES_FILE.read_text(encoding="utf-8"), render_table()), encoding="utf-8")


def with_table(document: str, table: str) -> str:
    """The document's text with its table replaced.

    Raises:
        ValueError: the text does not have the two marks, once each and in order.
    """
    return replace_tables(document, BEGIN, END, table)


def render_table() -> str:
    """The routes, and then those that are refused by name."""
    rows = "".join(map(_row, ROUTES))
    refused = ", ".join(f"`{path}`" for path in NOT_SUPPORTED)
    return (
        "| route | what it does | key, where clients have keys |\n|---|---|---|\n"
        f"{rows}| {refused} | nothing: 501 with its name | {_KEYS[Audience.CLIENTS]} |\n\n"
    )


def _row(route: Route) -> str:
    described = route.summary
    if route.is_streamed:
        described += ", with `stream: true` as events"
    if route.note:
        described += f": {route.note}"
    return f"| `{route.method} {route.path}` | {described} | {_KEYS[route.audience]} |\n"


if __name__ == "__main__":
    main()
