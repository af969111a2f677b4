"""`lockstep chat`: a conversation in the terminal, or one user turn per line of a piped stdin."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence

import grpc

from lockstep.v1 import tokenizer_pb2
from shared.cli.client import Answer, run_client, stream_answer
from shared.cli.request_flags import add_client_flags, request_from
from shared.rpc import make_channel


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lockstep chat",
        description="Talk to the model. Ctrl-C ends an answer, Ctrl-D the conversation.",
    )
    add_client_flags(parser)
    args = parser.parse_args(argv)
    return run_client(lambda: _converse(args.target, request_from(args), args.timeout))


def _converse(target: str, request: tokenizer_pb2.GenerateRequest, timeout_s: float | None) -> None:
    """Answer turn by turn; `request` has no messages yet."""
    # Between answers the event loop stands still, so that reading a line needs no thread.
    with asyncio.Runner() as runner:
        channel = runner.run(_open(target))
        for turn in _read_turns():
            request.chat.messages.add(role=tokenizer_pb2.ROLE_USER, content=turn)
            answer = _answer(runner, channel, request, timeout_s)
            request.chat.messages.add(
                role=tokenizer_pb2.ROLE_ASSISTANT, content=answer.text, reasoning=answer.reasoning
            )
        runner.run(channel.close())


def _answer(
    runner: asyncio.Runner,
    channel: grpc.aio.Channel,
    request: tokenizer_pb2.GenerateRequest,
    timeout_s: float | None,
) -> Answer:
    """Stream one answer and return it; a person's Ctrl-C cuts it short."""
    answer = Answer()
    try:
        runner.run(stream_answer(channel, request, answer, timeout_s=timeout_s))
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    return answer


def _read_turns() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


async def _open(target: str) -> grpc.aio.Channel:
    # A channel belongs to the event loop that runs when it is made.
    return make_channel(target)
