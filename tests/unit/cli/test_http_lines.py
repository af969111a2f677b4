"""The last lines of a start: where the HTTP API is, for a browser, a library and `curl`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from services.cli import serve
from services.cli.extras import EXTRA_TO_MODULES
from services.cli.http_lines import describe_http
from services.cli.serve_settings import ServeSettings
from shared.config import load_settings
from shared.network.tls import Role
from tests.support.cells.certificates import Authority, write_files
from tests.support.cells.tls_cell import tls_flags
from tests.support.clients.key_files import key_line, write_keys
from tests.support.system.ports import free_port


def lines(model_dir: Path, *flags: str) -> dict[str, str]:
    """What a start says, by the words at the left."""
    described = describe_http(load_settings(ServeSettings, [str(model_dir), *flags]))
    return {line[2:13].rstrip(): line[13:] for line in described}


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--http-listen=[::1]:81"], "http://[::1]:81"),
        # What means every interface is no host of a URL.
        (["--insecure-http-bind=0.0.0.0:80"], "http://127.0.0.1:80"),
        (["--insecure-http-bind=[::]:80"], "http://127.0.0.1:80"),
        (["--insecure-http-bind=10.0.0.1:80"], "http://10.0.0.1:80"),
    ],
)
def test_a_start_ends_with_the_page_the_base_url_and_a_command(tmp_path: Path, flags: list[str], url: str) -> None:
    found = lines(tmp_path, *flags)
    assert [*found] == ["page", "base URL", "try"]
    assert found["page"] == f"{url}/{', not encrypted' if 'insecure' in ''.join(flags) else ''}"
    assert found["base URL"].startswith(f"{url}/v1 with any key")
    command = shlex.split(found["try"])
    assert command[:2] == ["curl", f"{url}/v1/completions"]
    assert json.loads(command[-1]) == {"prompt": "The capital of France is"}


def test_a_model_with_a_chat_template_is_asked_in_a_chat(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert "/v1/chat/completions" in lines(tmp_path)["try"]


def test_without_http_nothing_is_said_and_a_port_that_is_not_known_is_in_the_log(tmp_path: Path) -> None:
    assert lines(tmp_path, "--no-http") == {}
    assert lines(tmp_path, "--http-listen=127.0.0.1:0") == {"HTTP": "127.0.0.1:0: the log says which port it is"}


def test_a_socket_has_no_page_and_is_reached_by_its_path(tmp_path: Path) -> None:
    found = lines(tmp_path, "--http-listen=unix:/run/a b")
    assert [*found] == ["HTTP", "base URL", "try"]
    assert shlex.split(found["try"])[:4] == ["curl", "--unix-socket", "/run/a b", "http://localhost/v1/completions"]


def test_with_tls_and_keys_the_command_has_what_it_needs_and_no_key(tmp_path: Path) -> None:
    authority = Authority()
    files = write_files(tmp_path, authority.issue_role(Role.TOKENIZER), authority)
    keys = write_keys(tmp_path / "keys", key_line("a secret"))
    found = lines(tmp_path, *tls_flags(files), "--http-listen=0.0.0.0:8443", f"--client-keys={keys}")
    domain = f"tokenizer.{files.trust_domain}"
    assert found["page"] == f"https://{domain}:8443/"
    command = shlex.split(found["try"])
    assert command[1:5] == ["--cacert", str(files.authority), "--connect-to", "::127.0.0.1:8443"]
    assert command[-1] == "Authorization: Bearer $LOCKSTEP_API_KEY"


def test_without_the_packages_a_line_says_so_unless_an_address_asks_for_http(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(EXTRA_TO_MODULES, "http", ("no_such_module",))
    listen = f"--listen=127.0.0.1:{free_port()}"
    # The name ends both starts.
    assert serve.main(["nothing", listen]) == 2
    note, problem = capsys.readouterr().err.splitlines()
    assert note.startswith("note: no HTTP, only gRPC: `lockstep serve` needs no_such_module: pip install '.[http]'")
    assert problem.startswith("error: nothing is not a directory here")
    assert serve.main(["nothing", listen, "--http-listen=127.0.0.1:0"]) == 2
    assert capsys.readouterr().err.startswith("error: `lockstep serve` needs no_such_module: pip install '.[http]'")
