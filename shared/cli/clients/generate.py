"""`lockstep generate`: continue one prompt in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Sequence

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.cli.clients.client import (
    Answer,
    describe_finish,
    describe_logprobs,
    note_recovery,
    run_client,
    stream_answer,
)
from shared.cli.clients.request_flags import add_client_flags, request_from
from shared.cli.clients.wrong_service import TOKENIZER, explain_wrong_service
from shared.cli.tls_flags import peer_of_client
from shared.network.rpc import Peer, make_channel
from shared.network.tls import Role
from shared.process.encoding import describe_locale


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lockstep generate", description="Continue a text, without a chat template.")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("-n", type=int, default=1, choices=range(1, 9), metavar="N", help="how many answers, at most 8")
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    parser.add_argument(
        "--logprobs", type=int, choices=range(21), metavar="K", help="show the logprobs of each token and of the top K"
    )
    add_client_flags(parser)
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
    peer = peer_of_client(parser, args, Role.TOKENIZER)
    generate = _generate
    if args.n > 1:
        request.sampling.n = args.n
        generate = _generate_several
    return run_client(lambda: asyncio.run(generate(args.target, peer, request, args.timeout)))


async def _generate(
    target: str, peer: Peer | None, request: tokenizer_pb2.GenerateRequest, timeout_s: float | None
) -> None:
    answer = Answer()
    async with make_channel(target, peer=peer) as channel, explain_wrong_service(channel, target, TOKENIZER):
        await stream_answer(channel, request, answer, timeout_s=timeout_s)
    if answer.logprobs:
        print(f"\n{describe_logprobs(answer.logprobs)}")


async def _generate_several(
    target: str, peer: Peer | None, request: tokenizer_pb2.GenerateRequest, timeout_s: float | None
) -> None:
    """Complete answers only: interleaved streams could not be told apart."""
    answers: dict[int, Answer] = defaultdict(Answer)
    async with make_channel(target, peer=peer) as channel, explain_wrong_service(channel, target, TOKENIZER):
        async for response in tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request, timeout=timeout_s):
            answer = answers[response.choice]
            answer.add(response)
            if response.HasField("finish"):
                print(f"{response.choice + 1}. {describe_finish(answer.finish)}\n{answer.text}\n", flush=True)
                note_recovery(answer.finish)
                if answer.logprobs:
                    print(f"{describe_logprobs(answer.logprobs)}\n")
