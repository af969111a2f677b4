"""A client process that opens streams only to reset them, in bursts on several channels.

    python -m tests.support.clients.stream_resetter ADDRESS tokenizer|scheduler NUM_STREAMS

It writes a line after each burst, and exits with 0 when all streams have been opened and reset. In every other burst it
waits for the answer to the last stream, so that the server has received the others on that channel before they are
reset.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.flood import open_channels, start_generate
from tests.support.system.patience import PATIENCE_S

_BURST = 250
# So many that no stream ends before it is reset.
_MAX_TOKENS = 400


def main() -> None:
    """Open and reset NUM_STREAMS streams."""
    address, role, num_streams = sys.argv[1:]
    asyncio.run(_reset_streams(address, int(num_streams), is_scheduler=role == "scheduler"))


async def _reset_streams(address: str, num_streams: int, *, is_scheduler: bool) -> None:
    async with open_channels(address) as channels:
        sizes = [min(_BURST, num_streams - first) for first in range(0, num_streams, _BURST)]
        lanes = [sizes[number :: len(channels)] for number in range(len(channels))]
        await asyncio.gather(
            *(_reset_bursts(channel, lane, is_scheduler) for channel, lane in zip(channels, lanes, strict=True))
        )


async def _reset_bursts(channel: grpc.aio.Channel, sizes: list[int], is_scheduler: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await channel.channel_ready()
    for number, size in enumerate(sizes):
        calls = [start_generate(channel, is_scheduler=is_scheduler, max_tokens=_MAX_TOKENS) for _ in range(size)]
        # Let the requests be sent.
        await asyncio.sleep(0)
        if number % 2:
            await _wait_for_answer(calls[-1])
        for call in calls:
            call.cancel()
        sys.stdout.write("burst\n")
        sys.stdout.flush()


async def _wait_for_answer(call: Any) -> None:
    """Wait until the server has accepted a call or refused it with QUEUE_FULL.

    Raises:
        grpc.aio.AioRpcError: The call failed with a different error.
    """
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        if reason_of(status_from_rpc_error(error)) != "QUEUE_FULL":
            raise


if __name__ == "__main__":
    main()
