"""`lockstep generate`: continue one prompt in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

import grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.cli.clients.client import (
    Answer,
    describe_finish,
    describe_logprobs,
    note_recovery,
    open_channel,
    run_client,
    stream_answer,
)
from services.cli.clients.key_flag import Metadata, metadata_of
from services.cli.clients.request_flags import add_client_flags, find_tokenizer, request_from
from services.cli.clients.running_cells import Target
from services.cli.tls_flags import peer_of_client
from shared.flag_parser import FlagParser
from shared.network.rpc import Peer
from shared.network.tls import Role
from shared.process.encoding import describe_locale


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(prog="lockstep generate", description="Continue a text, without a chat template.")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("-n", type=int, default=1, choices=range(1, 9), metavar="N", help="how many answers, at most 8")
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    parser.add_argument(
        "--logprobs", type=int, choices=range(21), metavar="K", help="show the logprobs of each token and of the top K"
    )
    add_client_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        request = request_from(args)
        request.text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        parser.error(f"stdin is not UTF-8: {error}")
    except UnicodeEncodeError:
        parser.error(f"the prompt or the text of a flag is not UTF-8{describe_locale()}")
    request.echo = args.echo
    if args.logprobs is not None:
        request.sampling.num_logprobs = args.logprobs
    peer, metadata = peer_of_client(parser, args, Role.TOKENIZER), metadata_of(parser, args)
    generate = _generate
    if args.n > 1:
        request.sampling.n = args.n
        generate = _generate_several
    target = find_tokenizer(args)
    return run_client(
        lambda: asyncio.run(
            _call(target, peer, metadata, lambda channel: generate(channel, request, args.timeout, metadata))
        )
    )


async def _call(
    target: Target, peer: Peer | None, metadata: Metadata, generate: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    async with open_channel(target, peer, metadata) as channel:
        await generate(channel)


async def _generate(
    channel: grpc.aio.Channel,
    request: tokenizer_pb2.GenerateRequest,
    timeout_s: float | None,
    metadata: Metadata,
) -> None:
    answer = Answer()
    await stream_answer(channel, request, answer, timeout_s=timeout_s, metadata=metadata)
    if answer.logprobs:
        print(f"\n{describe_logprobs(answer.logprobs)}")


async def _generate_several(
    channel: grpc.aio.Channel,
    request: tokenizer_pb2.GenerateRequest,
    timeout_s: float | None,
    metadata: Metadata,
) -> None:
    """Complete answers only: interleaved streams could not be told apart."""
    answers: dict[int, Answer] = defaultdict(Answer)
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    async for response in stub.Generate(request, timeout=timeout_s, metadata=metadata):
        answer = answers[response.choice]
        answer.add(response)
        if response.HasField("finish"):
            print(f"{response.choice + 1}. {describe_finish(answer.finish)}\n{answer.text}\n", flush=True)
            note_recovery(answer.finish)
            if answer.logprobs:
                print(f"{describe_logprobs(answer.logprobs)}\n")
