"""The script that downloads a model: only whole files with the right hash get their names."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.deploy.chart import CHART

pytestmark = pytest.mark.process

SCRIPT = CHART / "files" / "fetch_model.py"
FILES = {"config.json": b"{}", "weights/model.safetensors": bytes(range(256)) * 9000}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class's name


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP; gives its URL."""
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class Download:
    """A source, a manifest of its files, and the directory that they belong in."""

    def __init__(self, folder: Path) -> None:
        self.source, self.directory, self._manifest = folder / "source", folder / "model", folder / "manifest.json"
        for name, data in FILES.items():
            path = self.source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def flags(self, url: str) -> list[str]:
        sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
        self._manifest.write_text(json.dumps({"url": url, "sha256": sha256}))
        return [f"--manifest={self._manifest}", f"--directory={self.directory}"]

    def run(self) -> subprocess.CompletedProcess[str]:
        with served(self.source) as url:
            return run(*self.flags(url))

    @property
    def is_complete(self) -> bool:
        return any(self.directory.glob(".complete-*"))


@pytest.fixture
def download(tmp_path: Path) -> Download:
    return Download(tmp_path)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", SCRIPT, *flags], capture_output=True, text=True, check=False)


def test_files_arrive_whole(download: Download) -> None:
    assert download.run().returncode == 0
    assert {name: (download.directory / name).read_bytes() for name in FILES} == FILES
    assert download.is_complete


@pytest.mark.parametrize("content", [b"[]", b""], ids=["changed", "cut off"])
def test_another_content_gets_no_name(download: Download, content: bytes) -> None:
    (download.source / "config.json").write_bytes(content)
    result = download.run()
    assert result.returncode == 1
    assert "config.json: its SHA-256 is" in result.stderr
    assert [path for path in download.directory.rglob("*") if path.is_file()] == []


def test_a_file_that_is_missing_fails_the_job(download: Download) -> None:
    (download.source / "weights" / "model.safetensors").unlink()
    result = download.run()
    assert result.returncode == 1
    assert "404" in result.stderr
    assert not download.is_complete


def test_a_second_run_keeps_good_files_and_replaces_bad_ones(download: Download) -> None:
    download.run()
    good, bad = download.directory / "weights" / "model.safetensors", download.directory / "config.json"
    inode = good.stat().st_ino
    bad.write_bytes(b"spoilt")
    assert download.run().returncode == 0
    assert bad.read_bytes() == FILES["config.json"]
    assert good.stat().st_ino == inode


def test_a_pod_waits_for_the_whole_model(download: Download) -> None:
    with served(download.source) as url:
        flags = download.flags(url)
        with subprocess.Popen([sys.executable, "-I", SCRIPT, *flags, "--wait"]) as waiting:
            try:
                assert run(*flags).returncode == 0
                assert waiting.wait(timeout=60) == 0
            finally:
                waiting.kill()
