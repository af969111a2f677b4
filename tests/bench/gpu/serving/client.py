"""Clients of a cell in processes of their own, so that what they compute takes no time from what is measured.

A client reads loads, one per line, `{"address": …, "requests": [[prompt, num_output_tokens], …]}`. It sends all
requests of a load at once, and answers `{"started_at": …, "ended_at": …, "ttfts_s": […]}`, by the machine's monotonic
clock.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.bench.gpu.serving.requests import Request, num_output_tokens
from tests.support.system.processes import ROOT, module_command, module_environment


@dataclass(frozen=True, slots=True)
class Served:
    """What clients measured of a load."""

    num_tokens: int
    """Of all answers."""
    seconds: float
    """From the first client's start to the last one's end."""
    ttfts_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Of answers, prompts' time included."""
        return self.num_tokens / self.seconds


class Clients:
    """The processes; created by `start_clients`."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def send(self, address: str, requests: Sequence[Request]) -> Served:
        """Send all requests to a cell at once, each client its share, and wait for the answers.

        Raises:
            RuntimeError: a client ended; its error is on stderr.
        """
        for number, process in enumerate(self._processes):
            share = [[each.prompt, each.num_output_tokens] for each in requests[number :: len(self._processes)]]
            assert process.stdin is not None
            process.stdin.write(json.dumps({"address": address, "requests": share}) + "\n")
            process.stdin.flush()
        answers = [_answer(process) for process in self._processes]
        started_at = min(float(answer["started_at"]) for answer in answers)
        ended_at = max(float(answer["ended_at"]) for answer in answers)
        ttfts_s = [ttft_s for answer in answers for ttft_s in answer["ttfts_s"]]
        return Served(num_output_tokens(requests), ended_at - started_at, ttfts_s)


@contextmanager
def start_clients(count: int) -> Iterator[Clients]:
    """Start the processes, and end them at the end."""
    processes = [
        subprocess.Popen(
            module_command("tests.bench.gpu.serving.client"),
            cwd=ROOT,
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        yield Clients(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a client ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _send_load(load: dict[str, Any]) -> dict[str, Any]:
    async with make_channel(load["address"]) as channel:
        await channel.channel_ready()
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        started_at = time.monotonic()
        ttfts_s = await asyncio.gather(*(_send(stub, *request) for request in load["requests"]))
        return {"started_at": started_at, "ended_at": time.monotonic(), "ttfts_s": ttfts_s}


async def _send(stub: tokenizer_pb2_grpc.TokenizerServiceStub, prompt: list[int], num_output_tokens: int) -> float:
    """Returns the seconds to the first token."""
    request = tokenizer_pb2.GenerateRequest(
        tokens=common_pb2.TokenSequence(token_ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True),
    )
    started_at = time.monotonic()
    ttft_s: float | None = None
    usage = common_pb2.Usage()
    async for response in stub.Generate(request):
        if ttft_s is None and response.token_ids:
            ttft_s = time.monotonic() - started_at
        usage = response.finish.usage
    if ttft_s is None or usage.num_completion_tokens != num_output_tokens:
        raise RuntimeError(f"{num_output_tokens} tokens were asked for: {usage}")
    return ttft_s


def main() -> None:
    """Serve loads until stdin is closed."""
    for line in sys.stdin:
        print(json.dumps(uvloop.run(_send_load(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
