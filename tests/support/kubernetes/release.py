"""A release of the chart on a node, with TLS and clients' keys, and clients that ask it."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from shared.network.tls import Role
from tests.support.cells.certificates import Authority, Issued
from tests.support.clients.http_answers import COMPLETION, HttpAnswer, RefusedError, post_streamed
from tests.support.clients.key_files import key_line
from tests.support.deploy.chart import CHART, Tree
from tests.support.deploy.chart_values import values
from tests.support.kubernetes.cluster_dns import endpoints
from tests.support.kubernetes.images import REGISTRY, TAG
from tests.support.kubernetes.node import Node
from tests.support.system.package_tools import tool
from tests.support.system.patience import PATIENCE_S
from tests.support.system.polling import poll_until

NAMESPACE = "lockstep"
_TOKENIZER = f"rel-cell-tokenizer.{NAMESPACE}"
_PODS = "labelSelector=app.kubernetes.io/instance%3Drel,app.kubernetes.io/component%21%3Dtest"
_SECRETS = {role: f"{role}-tls" for role in ("tokenizer", "scheduler", "worker")}
_NUM_STREAMS = 4
_NUM_TOKENS = 64
_BODY = {"prompt": "Once", "max_tokens": _NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
_RETRY_S = 0.2


def cell_values(tag: str = TAG, dp: int = 2) -> Tree:
    """Values of a small cell, whose trust domain is that of the tests' certificates."""
    few = {"cpu": "50m", "cpuLimit": "none"}
    workers = {"gpu": {"resource": ""}, "sharedMemory": "256Mi", "cacheSize": "1Gi", "settings": {"num-threads": 1}}
    cell: Mapping[str, Any] = {
        "name": "cell",
        "tls": {"trustDomain": "test", "issuer": {"name": ""}, "secrets": _SECRETS},
        "clientKeys": {"secret": "keys", "testSecret": "test-key"},
        "tokenizer": {"image": {"tag": tag}, "resources": {**few, "memory": "1Gi"}},
        "scheduler": {"image": {"tag": tag}, "resources": {**few, "memory": "1Gi"}},
        "workers": {
            **workers,
            "image": {"name": "lockstep-worker-cpu", "tag": tag},
            "dp": dp,
            "resources": {**few, "memory": "3Gi"},
        },
    }
    # The DNS server is no pod.
    network = {"dns": [{"ipBlock": {"cidr": "10.96.0.0/16"}}]}
    return values(cell, images={"registry": REGISTRY}, networkPolicy=network)


class Release:
    """The release `rel` with its secrets, in the namespace `NAMESPACE`.

    Attributes:
        node: Where it runs.
        key: The key with which streams ask.
    """

    def __init__(self, node: Node, folder: Path) -> None:
        """Nothing is installed yet."""
        self.node = node
        self.key = "key-1"
        self._values = folder / "values.json"
        self._authority = Authority()
        self._context = ssl.create_default_context(cadata=self._authority.pem.decode())
        # Pods are called by their addresses, which certificates do not have.
        self._context.check_hostname = False

    def apply(self, *objects: Tree) -> None:
        """Create or change objects."""
        self.node.kubectl("apply", f"--namespace={NAMESPACE}", "--filename=-", objects=objects)

    def accept_keys(self, *keys: str) -> None:
        """Replace the keys that are accepted; `helm test` asks with the last one."""
        lines = "\n".join(key_line(key) for key in keys)
        self.apply(_secret("keys", {"keys.jsonl": lines.encode()}), _secret("test-key", {"key": keys[-1].encode()}))

    def renew_certificates(self) -> Mapping[str, Issued]:
        """Give each role another certificate of the same authority; returns them."""
        issued = {role: self._authority.issue_role(Role(role)) for role in _SECRETS}
        for role, own in issued.items():
            data = {"tls.crt": own.certificate, "tls.key": own.key, "ca.crt": self._authority.pem}
            self.apply(_secret(_SECRETS[role], data))
        return issued

    def upgrade(self, **changes: Any) -> None:
        """Install or upgrade it with `cell_values`, and wait until its pods are ready."""
        self._values.write_text(json.dumps(cell_values(**changes)), encoding="utf-8")
        self.helm("upgrade", "--install", "rel", str(CHART), f"--values={self._values}", "--wait")

    def helm(self, *args: str) -> None:
        """Run Helm in its namespace; fails if Helm does."""
        where = (f"--namespace={NAMESPACE}", f"--kubeconfig={self.node.server.kubeconfig}", "--timeout=20m")
        done = subprocess.run([str(tool("helm-4")), *args, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def pods(self) -> Mapping[str, Tree]:
        """The pods of its roles by their uids, those included that are about to end."""
        found = self.node.server.get(f"/api/v1/namespaces/{NAMESPACE}/pods?{_PODS}")["items"]
        return {pod["metadata"]["uid"]: pod for pod in found}

    async def wait_for_pods(self, number: int) -> None:
        """Wait until there are this many pods: those that end have ended."""
        await poll_until(lambda: asyncio.to_thread(self.pods), lambda pods: len(pods) == number)

    def addresses(self) -> list[str]:
        """The addresses of tokenizers that are ready."""
        return [address for service, _, address in endpoints(self.node.server) if service == _TOKENIZER]

    def certificates(self) -> set[str]:
        """The certificates that these show."""
        return {ssl.get_server_certificate((address, 8000)) for address in self.addresses()}

    async def accepts(self, key: str) -> set[bool]:
        """Whether tokenizers accept a key: what each of them says."""
        found = await asyncio.to_thread(self.addresses)
        told = await asyncio.gather(*(self._ask_one(address, key) for address in found), return_exceptions=True)
        assert all(isinstance(each, HttpAnswer) or getattr(each, "status", 0) == 401 for each in told), told
        return {isinstance(each, HttpAnswer) for each in told}

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Ask again and again during the block; each answer must come, and be whole."""
        is_over = asyncio.Event()

        async def ask_again() -> None:
            while not is_over.is_set():
                answer = await self._ask()
                assert [len(choice.token_ids) for choice in answer.choices.values()] == [_NUM_TOKENS]

        async with asyncio.TaskGroup() as group:
            for _ in range(_NUM_STREAMS):
                group.create_task(ask_again())
            yield
            is_over.set()

    async def _ask(self) -> HttpAnswer:
        """Ask any tokenizer, as clients do that try again where no answer was begun."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                addresses = await asyncio.to_thread(self.addresses)
                try:
                    if addresses:
                        return await self._ask_one(random.choice(addresses), self.key)
                except aiohttp.ClientConnectorError:
                    pass
                except RefusedError as error:
                    if error.status not in (429, 503):
                        raise
                await asyncio.sleep(_RETRY_S)

    async def _ask_one(self, address: str, key: str) -> HttpAnswer:
        connector, headers = aiohttp.TCPConnector(ssl=self._context), {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(f"https://{address}:8000", connector=connector, headers=headers) as session:
            return await post_streamed(session, COMPLETION, _BODY)


def _secret(name: str, data: Mapping[str, bytes]) -> Tree:
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}
