"""The script with which `helm test` asks over HTTP: what it sends, which certificates it takes, when it asks again."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from shared.network.tls import Role
from tests.support.cells.certificates import DOMAIN, Authority, write_files
from tests.support.deploy.chart import CHART

pytestmark = pytest.mark.process

SCRIPT = CHART / "files" / "ask_http.py"
ANSWER = (200, {"choices": [{"text": " Paris."}]})
FULL = (429, {"error": {"code": "server_overloaded"}})
NOT_READY = (503, {"error": {"code": "not_ready"}})
WRONG = (400, {"error": {"code": "context_length_exceeded"}})


@dataclass
class Cell:
    """Answers one after another.

    Attributes:
        target: Where it is.
        authorizations: That of each request.
        requests: The path, the host and the body of each.
    """

    target: str = ""
    authorizations: list[str | None] = field(default_factory=list)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)


@contextmanager
def serving(answers: Sequence[tuple[int, Any]], context: ssl.SSLContext | None = None) -> Iterator[Cell]:
    cell, left = Cell(), iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            cell.authorizations.append(self.headers["Authorization"])
            cell.requests.append((self.path, self.headers["Host"], body))
            status, answer = next(left)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class's name

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        cell.target = f"127.0.0.1:{server.server_address[1]}"
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield cell
        finally:
            server.shutdown()


def ask(cell: Cell, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "The capital of France is", f"--target={cell.target}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_prints_a_vector_of_the_prompt() -> None:
    with serving([(200, {"data": [{"embedding": [0.5, -1.0]}]})]) as cell:
        answer = ask(cell, "--embed")
    assert (answer.returncode, answer.stdout) == (0, "[0.5, -1.0]\n")
    assert [(path, body) for path, _, body in cell.requests] == [
        ("/v1/embeddings", {"input": "The capital of France is"})
    ]


def test_it_prints_the_answer_to_the_prompt() -> None:
    with serving([ANSWER]) as cell:
        result = ask(cell, "--max-tokens=3")
    assert (result.returncode, result.stdout) == (0, " Paris.\n")
    assert cell.requests == [("/v1/completions", cell.target, {"prompt": "The capital of France is", "max_tokens": 3})]


def test_it_asks_again_while_the_cell_has_no_room_or_no_workers() -> None:
    with serving([NOT_READY, FULL, ANSWER]) as cell:
        result = ask(cell)
    assert (result.returncode, result.stdout, len(cell.requests)) == (0, " Paris.\n", 3)


def test_it_tells_of_any_other_error_at_once() -> None:
    with serving([WRONG]) as cell:
        result = ask(cell)
    assert result.returncode == 1
    assert result.stderr.startswith("error: 400: ")
    assert "context_length_exceeded" in result.stderr


def test_it_gives_up() -> None:
    with serving([NOT_READY]) as cell:
        result = ask(cell, "--timeout=0")
    assert (result.returncode, result.stderr[:11]) == (1, "error: 503:")


def test_it_names_the_host_that_it_is_given() -> None:
    with serving([ANSWER]) as cell:
        ask(cell, "--host=api.example.org")
    assert [host for _, host, _ in cell.requests] == ["api.example.org"]


def test_it_sends_the_key_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-one\n", encoding="ascii")
    with serving([ANSWER, ANSWER]) as cell:
        ask(cell)
        assert ask(cell, f"--key-file={tmp_path / 'key'}").returncode == 0
    assert cell.authorizations == [None, "Bearer sk-one"]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[ssl.SSLContext, str]:
    """A tokenizer's certificate to serve with, and the flag that names its authority."""
    authority = Authority()
    write_files(tmp_path, authority.issue_role(Role.TOKENIZER), authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    return context, f"--tls-ca={tmp_path / 'ca.crt'}"


def test_with_tls_it_expects_the_cell_s_name_whatever_the_address(certificate: tuple[ssl.SSLContext, str]) -> None:
    context, authority = certificate
    with serving([ANSWER], context) as cell:
        result = ask(cell, authority, f"--server-name=tokenizer.{DOMAIN}")
    assert (result.returncode, result.stdout) == (0, " Paris.\n")


def test_it_shows_the_certificate_that_it_is_given(certificate: tuple[ssl.SSLContext, str], tmp_path: Path) -> None:
    context, authority = certificate
    clients = Authority("of clients")
    own = write_files(tmp_path / "client", clients.issue(), clients)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(own.authority)
    shown = (f"--tls-cert={own.certificate}", f"--tls-key={own.key}")
    with serving([ANSWER], context) as cell:
        found = [
            ask(cell, authority, f"--server-name=tokenizer.{DOMAIN}", "--timeout=0", *more).returncode
            for more in ((), shown)
        ]
    assert found == [1, 0]


def test_with_tls_it_refuses_another_name(certificate: tuple[ssl.SSLContext, str]) -> None:
    context, authority = certificate
    with serving([ANSWER], context) as cell:
        result = ask(cell, authority, "--server-name=tokenizer.elsewhere.example", "--timeout=0")
    assert result.returncode == 1
    assert "certificate" in result.stderr
    assert cell.requests == []
