"""A control plane of real processes on loopback: etcd, and an API server that checks, defaults and stores objects.

Nothing here schedules or runs pods: see `node`. The binaries are those of `KUBERNETES_BIN`, one or several folders,
else of the PATH; etcd's may also be Debian's, which `make test-cluster` unpacks.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, program_command

_TOKEN = "token-of-the-operator"
_DEBIAN = ROOT / ".cache" / "etcd" / "usr" / "bin"
_POLL_S = 0.1


def find_binary(name: str) -> Path | None:
    """A program of Kubernetes or etcd, or None."""
    given = os.environ.get("KUBERNETES_BIN", "")
    folders = os.pathsep.join([*filter(None, [given]), os.environ.get("PATH", ""), str(_DEBIAN)])
    found = shutil.which(name, path=folders)
    return None if found is None else Path(found)


def missing_binaries(*names: str) -> str:
    """Why tests that need these are skipped; empty if all are there."""
    missing = [name for name in names if find_binary(name) is None]
    return f"no {' and no '.join(missing)} in KUBERNETES_BIN or on the PATH" if missing else ""


@contextmanager
def run_etcd(folder: Path) -> Iterator[str]:
    """Run etcd with its data in a folder; yields its address for clients."""
    clients, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    flags = {
        "data-dir": folder / "etcd",
        "listen-client-urls": clients,
        "advertise-client-urls": clients,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
        "log-level": "error",
    }
    with running("etcd", flags, folder) as process:
        _wait_for(f"{clients}/health", process)
        yield clients


class ApiServer:
    """A running API server.

    Attributes:
        kubeconfig: A file with which Helm reaches it, as an operator who may do everything.
    """

    def __init__(self, url: str, folder: Path) -> None:
        """Write the kubeconfig."""
        self._url = url
        self.kubeconfig = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        self.kubeconfig.write_text(json.dumps(config), encoding="utf-8")

    def get(self, path: str) -> Any:
        """An object, by its path below the server's root."""
        return json.loads(_fetch(f"{self._url}{path}"))


@contextmanager
def run_api_server(folder: Path, **more: object) -> Iterator[ApiServer]:
    """Run an API server with an etcd of its own, with more flags or others; `_` in a name is `-`."""
    with run_etcd(folder) as etcd:
        given = {name.replace("_", "-"): value for name, value in more.items()}
        flags = {**api_server_flags(folder, etcd, free_port()), **given}
        (folder / "tokens.csv").write_text(f'{_TOKEN},operator,1,"system:masters"\n', encoding="utf-8")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / "account.key").write_bytes(private)
        with running("kube-apiserver", flags, folder) as process:
            url = f"https://{flags['bind-address']}:{flags['secure-port']}"
            _wait_for(f"{url}/readyz", process)
            yield ApiServer(url, folder)


def api_server_flags(folder: Path, etcd: str, port: int) -> Mapping[str, object]:
    """The API server's flags."""
    return {
        "etcd-servers": etcd,
        "bind-address": "127.0.0.1",
        "secure-port": port,
        # It makes a certificate of its own there.
        "cert-dir": folder / "certificates",
        "token-auth-file": folder / "tokens.csv",
        "authorization-mode": "RBAC",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": folder / "account.key",
        "service-account-signing-key-file": folder / "account.key",
        "service-cluster-ip-range": "10.96.0.0/16",
        # Nothing makes accounts or their tokens.
        "disable-admission-plugins": "ServiceAccount",
        # Its cache waits for what a later etcd than Debian's 3.4.23 tells.
        "watch-cache": "false",
    }


@contextmanager
def running(
    name: str, flags: Mapping[str, object], folder: Path, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, whose command may have a prefix, with its log in a folder; it is killed at the end."""
    binary = find_binary(name)
    assert binary is not None, missing_binaries(name)
    command = program_command(*prefix, str(binary), *(f"--{flag}={value}" for flag, value in flags.items()))
    log = folder / f"{name}.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=folder) as process:
        try:
            yield process
        finally:
            # A prefix is a program that ends with its child, which nobody else would wait for.
            with suppress(psutil.NoSuchProcess):
                for each in (psutil.Process(process.pid).children() if prefix else []) or [process]:
                    each.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process answers; fails if it ends, or after five minutes."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} has ended"
        with suppress(OSError):
            _fetch(url)
            return
        time.sleep(_POLL_S)
    raise AssertionError(f"{url} does not answer")


def _fetch(url: str) -> bytes:
    # Its own certificate, on loopback.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {_TOKEN}"})
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        data: bytes = answer.read()
        return data
