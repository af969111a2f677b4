"""A cell under mixed traffic for an hour: what grows, and what is left once it is idle again.

    python -m tests.bench.soak models/smollm2-135m-instruct --minutes 60 --json soak.json

Clients of gRPC and HTTP stream answers, ask for whole ones, leave in the middle, set deadlines that pass, send what is
refused, use grammars, and hold connections on which they say nothing. The cell is measured when it is idle: at the
start, which is after half a minute of traffic, after five minutes, and at the end. Each answer that is not
cut short is compared with the first one to the same request, on the backend `reference`, whose answers do not depend on
the other requests of a step.

The figures are of each process: private memory, threads, descriptors; and of the scheduler: requests and blocks in use.
The ratio is to the start's. No figure has a target except those that must be zero.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import grpc

from tests.bench.parts.report import Row, compare, limit, report
from tests.bench.parts.worker_memory import private_bytes
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, chat_request, connect, text_request
from tests.support.system.ports import free_port

MIB = 2**20
FIRST_MEASURE_S = 300.0
NUM_CLIENTS = 8
# So few that every block has been written to after half a minute: the system gives memory to a block at its first use.
NUM_KV_BLOCKS = 128
# A client's pause between two requests, in seconds; the cell is to be busy, not overloaded.
MAX_PAUSE_S = 0.4
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}'
WORDS = ["the", "river", "a", "stone", "winter", "light", "and", "some", "bread", "over", "old", "roads", "again"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Traffic:
    """Sends requests, one after another, until it is told to pause.

    Attributes:
        counts: How the requests ended, by kind.
        num_changed: Answers that differ from the first one to the same request.
    """

    def __init__(self, client: Client, http: aiohttp.ClientSession, http_address: str) -> None:
        self._client = client
        self._http = http
        self._http_address = http_address
        self._request_to_text: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.num_changed = 0

    async def run(self, seed: int, until: float) -> None:
        """Send requests until the event loop's clock is at `until`."""
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        kinds: Sequence[Callable[[random.Random], Awaitable[None]]] = (
            self._stream,
            self._chat,
            self._leave_stream,
            self._pass_deadline,
            self._grammar,
            self._refused,
            self._http_stream,
            self._http_whole,
            self._http_leave,
            self._http_refused,
            self._say_nothing,
        )
        while loop.time() < until:
            kind = rng.choice(kinds)
            await kind(rng)
            self.counts[kind.__name__.strip("_")] += 1
            await asyncio.sleep(rng.uniform(0.0, MAX_PAUSE_S))

    def _check(self, request: str, text: str) -> None:
        self.num_changed += self._request_to_text.setdefault(request, text) != text

    async def _stream(self, rng: random.Random) -> None:
        prompt = _prompt(rng)
        completion = await self._client.generate(text_request(prompt, max_tokens=16))
        self._check(f"text {prompt}", completion.text)

    async def _chat(self, rng: random.Random) -> None:
        prompt = _prompt(rng)
        completion = await self._client.generate(chat_request(("user", prompt), max_tokens=16))
        self._check(f"chat {prompt}", completion.text)

    async def _leave_stream(self, rng: random.Random) -> None:
        call = self._client.tokenizer.Generate(text_request(_prompt(rng), max_tokens=64, ignore_eos=True))
        for _ in range(rng.randrange(1, 8)):
            await call.read()
        call.cancel()

    async def _pass_deadline(self, rng: random.Random) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._client.generate(text_request(_prompt(rng), max_tokens=64), deadline_s=rng.uniform(0.01, 0.3))

    async def _grammar(self, rng: random.Random) -> None:
        request = chat_request(("user", _prompt(rng)), max_tokens=24)
        request.structured_output.json_schema = SCHEMA
        await self._client.generate(request)

    async def _refused(self, rng: random.Random) -> None:
        request = text_request(_prompt(rng), max_tokens=4, temperature=-1.0)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._client.generate(request)
            raise AssertionError("it was not refused")

    async def _http_stream(self, rng: random.Random) -> None:
        body = _chat_body(_prompt(rng), stream=True)
        async with self._http.post(CHAT, json=body) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")

    async def _http_whole(self, rng: random.Random) -> None:
        prompt = _prompt(rng)
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        async with self._http.post(COMPLETIONS, json=body) as answer:
            self._check(f"text {prompt}", (await answer.json())["choices"][0]["text"])

    async def _http_leave(self, rng: random.Random) -> None:
        async with self._http.post(CHAT, json=_chat_body(_prompt(rng), stream=True)) as answer:
            await answer.content.readany()
            answer.close()

    async def _http_refused(self, rng: random.Random) -> None:
        body = rng.choice([b"{", b"[]", b'{"messages": 1}', b'{"messages": [], "n": -1}'])
        async with self._http.post(CHAT, data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400

    async def _say_nothing(self, rng: random.Random) -> None:
        host, port = self._http_address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        writer.close()


def main() -> None:
    """Run the cell, print the table, write the JSON."""
    args = _parse_args()
    http_address = f"127.0.0.1:{free_port()}"
    flags = (f"--http-listen={http_address}", f"--worker.kv-cache-num-blocks={NUM_KV_BLOCKS}")
    with start_cell(args.model_dir, REFERENCE, *flags) as cell:
        rows = asyncio.run(_soak(cell, http_address, args.minutes * 60.0))
    report(rows, args.json)


async def _soak(cell: Cell, http_address: str, duration_s: float) -> list[Row]:
    async with connect(cell) as client, cell.http_session() as http:
        traffic = Traffic(client, http, http_address)
        begun_at = time.monotonic()
        first_s = min(FIRST_MEASURE_S, duration_s / 2)
        measures = []
        for number, end_s in enumerate((first_s / 10, first_s, duration_s)):
            until = asyncio.get_running_loop().time() + begun_at + end_s - time.monotonic()
            await asyncio.gather(*(traffic.run(number * NUM_CLIENTS + each, until) for each in range(NUM_CLIENTS)))
            await client.wait_until_idle()
            measures.append(_measure(cell))
            print(f"after {time.monotonic() - begun_at:.0f} s: {measures[-1]}", file=sys.stderr)
        state = await client.state()
        rows = [
            compare(f"{name}, {when}", value, unit, reference=max(start, 1e-9))
            for when, measure in (("5 minutes", measures[1]), ("the end", measures[2]))
            for ((name, unit), value), start in zip(measure.items(), measures[0].values(), strict=True)
        ]
        return [
            *rows,
            Row("requests", sum(traffic.counts.values()), ""),
            limit("changed answers", traffic.num_changed, "", at_most=0),
            limit("lost epochs", state.num_lost_epochs, "", at_most=0),
            limit("blocks in use at the end", state.num_used_blocks, "", at_most=0),
            limit("requests in flight at the end", state.num_running + state.num_waiting, "", at_most=0),
        ]


def _measure(cell: Cell) -> dict[tuple[str, str], float]:
    figures: dict[tuple[str, str], float] = {}
    for name, process in sorted(cell.find_processes().items()):
        figures[f"{name}: private memory", "MiB"] = private_bytes(process.pid) / MIB
        figures[f"{name}: threads", ""] = process.num_threads()
        figures[f"{name}: descriptors", ""] = process.num_fds()
        figures[f"{name}: children", ""] = len(process.children(recursive=True))
    return figures


def _prompt(rng: random.Random) -> str:
    """One of a few hundred, so that answers come again."""
    return " ".join(random.Random(rng.randrange(300)).choices(WORDS, k=12))


def _chat_body(prompt: str, *, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": 16, "temperature": 0, "stream": stream}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="also write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
