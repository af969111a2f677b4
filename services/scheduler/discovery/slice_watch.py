"""The process that lists and watches EndpointSlices: the only importer of `kubernetes`.

The library blocks and parses in Python, so it has a process of its own: a thread would delay steps. Every report of
the API server goes to stdout as the whole set of endpoints, so that nothing can be missed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import urllib3
from kubernetes import client

from services.scheduler.discovery.endpoint_slices import merge_slices
from services.scheduler.discovery.watch_messages import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    MAX_LINE_BYTES,
    WatchMessage,
    WatchTask,
)
from shared.backoff import Backoff
from shared.file_state import read_regular_file
from shared.process.parent import make_end_with_parent

_CONNECT_TIMEOUT_S = 3.0
# The most that a server may be silent, beyond what it was asked for, before the connection counts as dead.
_MAX_GRACE_S = 10.0
# A round that ends sooner than this counts as failed: a server that closes every watch at once must not be flooded.
_MIN_ROUND_S = 1.0


class _DoubtError(Exception):
    """What was watched may not be what there is."""


class _Stream(Protocol):
    """The part of urllib3's response used here."""

    def stream(self, amt: int, decode_content: bool) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class SliceWatch:
    """Lists the slices of a service, watches them for a while, and begins again.

    Every round begins with a list, also after a watch that ended well. So an event that was lost on the way, a version
    that the server has forgotten (410, or 504 from some), and a dead connection all cost the same: one more list.
    """

    def __init__(self, task: WatchTask, send: Callable[[WatchMessage], None]) -> None:
        self._task = task
        self._grace_s = min(_MAX_GRACE_S, task.period_s)
        self._send = send
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        self._slices: dict[str, dict[str, Any]] = {}

    def run(self) -> NoReturn:
        """Watch until the process ends."""
        while True:
            began_at = time.monotonic()
            problem = self._run_round()
            if not problem and time.monotonic() - began_at >= min(_MIN_ROUND_S, self._task.period_s):
                self._backoff.reset()
                continue
            if problem:
                self._send(WatchMessage(problem=problem))
            time.sleep(self._backoff.next_delay_s())

    def _run_round(self) -> str:
        """List and watch; returns why it ended, which is empty if all is well."""
        try:
            with client.ApiClient(self._configuration()) as connection:
                api = client.DiscoveryV1Api(connection)
                self._watch(api, self._list(api))
        except client.ApiException as error:
            return f"the API server answered {error.status} {error.reason}: {_message_of(error)}"
        except (urllib3.exceptions.HTTPError, OSError, _DoubtError, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _configuration(self) -> client.Configuration:
        """Read anew for each round: tokens and authorities are rotated."""
        folder = Path(self._task.service_account)
        configuration = client.Configuration(host=self._task.api_server)
        token = read_regular_file(folder / "token").decode().strip()
        configuration.api_key = {"authorization": token}
        configuration.api_key_prefix = {"authorization": "Bearer"}
        configuration.ssl_ca_cert = str(folder / "ca.crt")
        # The library would try three times at once.
        configuration.retries = False
        return configuration

    def _list(self, api: client.DiscoveryV1Api) -> str:
        """Replace what is known; returns the version from which to watch."""
        response = self._call(api, _request_timeout=(_CONNECT_TIMEOUT_S, self._grace_s))
        # Not parsed by the library, which refuses slices that have `endpoints: null`.
        listed = json.loads(response.data)
        self._slices = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
        self._report(is_watched=False)
        version: str = listed["metadata"]["resourceVersion"]
        return version

    def _watch(self, api: client.DiscoveryV1Api, version: str) -> None:
        """Follow changes until the server ends the watch.

        Raises:
            _DoubtError: the server cannot continue from this version, or says something that is not understood.
        """
        period_s = self._task.period_s
        stream = self._call(
            api,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=max(1, round(period_s)),
            _request_timeout=(_CONNECT_TIMEOUT_S, period_s + self._grace_s),
        )
        ends_at = time.monotonic() + period_s
        try:
            for line in _lines_of(stream):
                self._apply(json.loads(line))
                self._report(is_watched=True)
                if time.monotonic() > ends_at:
                    # The server does not end it.
                    break
            # Nothing may have changed all the time.
            self._report(is_watched=True)
        finally:
            stream.close()

    def _call(self, api: client.DiscoveryV1Api, **options: Any) -> Any:
        return api.list_namespaced_endpoint_slice(
            self._task.namespace,
            label_selector=f"kubernetes.io/service-name={self._task.service}",
            _preload_content=False,
            **options,
        )

    def _apply(self, event: dict[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        match kind:
            case "ADDED" | "MODIFIED":
                self._slices[item["metadata"]["name"]] = item
            case "DELETED":
                self._slices.pop(item["metadata"]["name"], None)
            case "BOOKMARK":
                pass
            case _:
                raise _DoubtError(f"the watch reports {kind} {item.get('code', '')}: {item.get('message', '')}")

    def _report(self, *, is_watched: bool) -> None:
        self._send(WatchMessage.of(merge_slices(self._slices.values(), self._task.port), is_watched=is_watched))


def _lines_of(stream: _Stream) -> Iterator[bytes]:
    buffer = b""
    for chunk in stream.stream(65536, decode_content=False):
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines
        if len(buffer) > MAX_LINE_BYTES:
            raise _DoubtError("an event is too long")
    if buffer:
        raise _DoubtError("the watch ended within an event")


def _message_of(error: client.ApiException) -> str:
    """The server's own message, shortened."""
    body = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else str(error.body)
    try:
        return str(json.loads(body)["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return body[:300]


def _write(message: WatchMessage) -> None:
    sys.stdout.buffer.write(message.line())
    sys.stdout.buffer.flush()


def main() -> NoReturn:
    """Entry point of the watching process."""
    task = WatchTask.model_validate_json(sys.argv[1])
    make_end_with_parent(task.parent_pid)()
    SliceWatch(task, _write).run()


if __name__ == "__main__":
    main()
