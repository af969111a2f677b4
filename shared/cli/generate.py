"""`lockstep generate`: continue one prompt and stream the text to the terminal."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from lockstep.v1 import tokenizer_pb2
from shared.cli.client import Answer, add_client_flags, request_from, run_client, stream_answer
from shared.rpc import make_channel


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lockstep generate", description="Continue a text, as it stands.")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    add_client_flags(parser)
    args = parser.parse_args(argv)
    request = request_from(args)
    request.text = args.prompt
    return run_client(lambda: asyncio.run(_generate(args.target, request, args.timeout)))


async def _generate(target: str, request: tokenizer_pb2.GenerateRequest, timeout_s: float | None) -> None:
    async with make_channel(target) as channel:
        await stream_answer(channel, request, Answer(), timeout_s=timeout_s)
