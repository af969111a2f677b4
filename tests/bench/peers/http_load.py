"""The load on a whole front end: streams that get one token per step, read by clients in a process of their own.

Needs only `tokenizers`, since a peer's driver runs in a separate environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import uvloop
from tokenizers import Tokenizer

from tests.bench.peers.front_end_load import TEXT_FILE
from tests.bench.peers.protocol import start_process

CLIENTS = "tests.bench.peers.http_clients"
MODEL_NAME = "bench"
PROMPT = "Tell me how this server works."
# Steps before the measured ones: a stream's first tokens cost more.
NUM_FIRST_STEPS = 4
# Time between steps per stream; a front end that needs longer gets it, so that no two tokens share a piece.
STEP_S_PER_STREAM = 100e-6
_POLL_S = 2e-3


class Server(Protocol):
    """A front end on uvloop, with its cell in the same process."""

    async def start(self) -> None:
        """Begin to serve, and configure the garbage collector as the real process does."""

    def address(self, kind: str) -> str:
        """The HOST:PORT for clients of a kind."""

    async def submitted(self, num_requests: int) -> Sequence[Any]:
        """Wait for requests; returns the cell's names of them."""

    def encode_step(self, requests: Sequence[Any], index: int, token_ids: Sequence[int], *, is_last: bool) -> Any:
        """A step's message, as it comes from the cell: the token at `index` of each request."""

    def hand_over(self, message: Any) -> None:
        """The message has come from the cell."""

    def has_taken_all(self) -> bool:
        """Whether every token so far has been given to its stream's writer."""


class StreamLoad:
    """Streams of one kind. Measured is the processor time of the server's process, with all threads and system calls.

    It begins with the bytes of a step's message, and ends with bytes on the clients' sockets.
    """

    def __init__(
        self, make: Callable[[Path], Server], *, model_dir: str, kind: str, num_streams: int, num_steps: int,
        client_python: str,
    ) -> None:  # fmt: skip
        """`client_python` is the interpreter for the clients."""
        tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        # No character is split between tokens, so that each token makes a piece.
        text = TEXT_FILE.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
        corpus = tokenizer.encode(text, add_special_tokens=False).ids
        self._num_streams, self._num_steps = num_streams, num_steps
        self._num_tokens = NUM_FIRST_STEPS + num_steps + 1
        places = [number * len(corpus) // num_streams for number in range(num_streams)]
        self._tokens = [
            [corpus[(place + offset) % len(corpus)] for offset in range(self._num_tokens)] for place in places
        ]
        self._num_text_bytes = sum(len(tokenizer.decode(tokens)) for tokens in self._tokens)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._server = make(Path(model_dir))
        self._runner.run(self._server.start())
        self._start_clients(kind, client_python)
        self.run()

    def run(self) -> dict[str, float]:
        """Run one repeat; returns the mean per token."""
        return {"token_us": self._runner.run(self._run())}

    def _start_clients(self, kind: str, client_python: str) -> None:
        self._stack = ExitStack()
        self._clients = self._stack.enter_context(start_process("the clients", client_python, CLIENTS))
        self._clients.start(
            "streams",
            kind=kind,
            address=self._server.address(kind),
            num_streams=self._num_streams,
            num_tokens=self._num_tokens,
        )

    async def _read_streams(self) -> dict[str, float]:
        """Read all streams to their ends; returns the pieces and the bytes of text."""
        figures, _ = await asyncio.to_thread(self._clients.run)
        return figures

    async def _run(self) -> float:
        clients = asyncio.create_task(self._read_streams())
        requests = await until(self._server.submitted(self._num_streams), clients)
        messages = [
            self._server.encode_step(
                requests, index, [tokens[index] for tokens in self._tokens], is_last=index == self._num_tokens - 1
            )
            for index in range(self._num_tokens)
        ]
        await self._run_steps(messages[:NUM_FIRST_STEPS])
        began_at = time.process_time()
        await self._run_steps(messages[NUM_FIRST_STEPS:-1])
        used_s = time.process_time() - began_at
        await self._run_steps(messages[-1:])
        self._check(await clients)
        return 1e6 * used_s / (self._num_steps * self._num_streams)

    async def _run_steps(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._server.hand_over(message)
            await asyncio.sleep(STEP_S_PER_STREAM * self._num_streams)
            # An event would need a change of what is measured.
            while not self._server.has_taken_all():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    def _check(self, figures: dict[str, float]) -> None:
        assert figures["num_text_bytes"] == self._num_text_bytes, "a text that does not match its tokens"
        assert figures["num_pieces"] == self._num_streams * self._num_tokens, "a token without a piece of its own"


async def until(awaited: Any, clients: asyncio.Task[Any]) -> Any:
    """The result of `awaited`; raises what ended the clients before it came."""
    task = asyncio.ensure_future(awaited)
    await asyncio.wait([task, clients], return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await clients
        raise RuntimeError("the clients have ended before their requests were served")
    return task.result()
