"""vLLM's server as a contestant. Runs in the environment `VLLM`, never in ours.

Everything is vLLM's own (its server, `AsyncLLM`, its front end), except the engine core's process and the socket to
it: messages come, as bytes, from this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, async_llm
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.bench.peers.http_load import MODEL_NAME, StreamLoad
from tests.bench.peers.protocol import serve
from tests.support.system.ports import free_port

_POLL_S = 0.1


class Engine:
    """What `AsyncLLM` uses of its client of the engine core."""

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.requests: asyncio.Queue[str] = asyncio.Queue()
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """What the model can do."""
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """A request has come."""
        self.requests.put_nowait(request.request_id)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Nothing runs."""

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next message."""
        return await self.outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        """There is no process."""


class VllmServer:
    """`vllm serve` with its defaults, but for the engine and the log of accesses; with or without statistics."""

    def __init__(self, model_dir: Path, *, keep_statistics: bool = False) -> None:
        self._port = free_port()
        arguments = [
            str(model_dir),
            *("--host=127.0.0.1", f"--port={self._port}", f"--served-model-name={MODEL_NAME}"),
            # The weights are never read.
            '--hf-overrides={"quantization_config": null}',
            *("--disable-uvicorn-access-log", *(() if keep_statistics else ("--disable-log-stats",))),
        ]
        self._args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        self._args.model = str(model_dir)
        validate_parsed_serve_args(self._args)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._queues: list[RequestOutputCollector] = []

    async def start(self) -> None:
        """See `Server`."""
        self._engine = Engine()
        EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: self._engine)
        async_llm.RequestOutputCollector = self._open_queue
        self._task = asyncio.create_task(run_server(self._args))
        while not await self._is_listening():
            if self._task.done():
                await self._task
            await asyncio.sleep(_POLL_S)
        freeze_gc_heap()

    def address(self, _kind: str) -> str:
        """See `Server`."""
        return f"127.0.0.1:{self._port}"

    async def submitted(self, num_requests: int) -> Sequence[str]:
        """See `Server`."""
        requests = [await self._engine.requests.get() for _ in range(num_requests)]
        del self._queues[:-num_requests]
        return requests

    def encode_step(
        self, requests: Sequence[str], _index: int, token_ids: Sequence[int], *, is_last: bool
    ) -> list[bytes]:
        """See `Server`."""
        reason = FinishReason.LENGTH if is_last else None
        outputs = [
            EngineCoreOutput(request, [token_id], finish_reason=reason)
            for request, token_id in zip(requests, token_ids, strict=True)
        ]
        message = EngineCoreOutputs(outputs=outputs, weight_version="default")
        return [bytes(frame) for frame in self._encoder.encode(message)]

    def hand_over(self, message: list[bytes]) -> None:
        """See `Server`."""
        self._engine.outputs.put_nowait(self._decoder.decode(message))

    def has_taken_all(self) -> bool:
        """See `Server`."""
        return self._engine.outputs.empty() and all(queue.output is None for queue in self._queues)

    def _open_queue(self, *args: Any) -> RequestOutputCollector:
        """A request's queue, which the load can see."""
        self._queues.append(RequestOutputCollector(*args))
        return self._queues[-1]

    async def _is_listening(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:
            return False
        writer.close()
        return True


if __name__ == "__main__":
    serve({
        "streams": partial(StreamLoad, VllmServer),
        "streams_with_statistics": partial(StreamLoad, partial(VllmServer, keep_statistics=True)),
    })  # fmt: skip
