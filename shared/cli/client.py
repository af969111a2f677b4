"""What the terminal's clients have in common: flags, asking the tokenizer service, streaming its answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.rpc import reason_of, status_from_rpc_error

DEFAULT_TARGET = "127.0.0.1:50051"

_INTERRUPTED = 130
_LAUNCHER_PROMPT = common_pb2.SamplingParams(temperature=0.0, max_tokens=256)


@dataclass(slots=True)
class Answer:
    """What has come of an answer so far."""

    text: str = ""
    finish: tokenizer_pb2.Finish = field(default_factory=tokenizer_pb2.Finish)


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add what a request may say beside its prompt, and where it goes. What is left out is the server's default."""
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="ADDRESS", help="server (default: %(default)s)")
    parser.add_argument("--max-tokens", type=_unsigned(32), metavar="N", help="most tokens of the answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy, at most 2")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that sum to this")
    parser.add_argument("--top-k", type=_unsigned(32), metavar="K", help="keep this many of the likeliest tokens")
    parser.add_argument("--seed", type=_unsigned(64), metavar="N", help="makes sampling repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may repeat")
    parser.add_argument("--priority", choices=("high", "normal", "low"), help="how urgent it is")
    parser.add_argument("--cache-salt", default="", metavar="TEXT", help="share cached prefixes with equal salts only")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="give up after so long")


def request_from(args: argparse.Namespace) -> tokenizer_pb2.GenerateRequest:
    """The request, but for its prompt, that the flags of `add_client_flags` describe."""
    sampling = common_pb2.SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    priority = None if args.priority is None else f"PRIORITY_{args.priority.upper()}"
    return tokenizer_pb2.GenerateRequest(
        sampling=sampling, stop=args.stop, priority=priority, cache_salt=args.cache_salt
    )


def run_client(body: Callable[[], None]) -> int:
    """Run a client command; returns the exit code. A failed call is told on stderr; Ctrl-C ends it quietly."""
    try:
        body()
    except grpc.aio.AioRpcError as error:
        print(f"error: {describe_failure(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """A failed call as `STATUS REASON: message`; without the reason when the server gave none."""
    status = status_from_rpc_error(error)
    names = (error.code().name, reason_of(status))
    return f"{' '.join(name for name in names if name)}: {status.message}"


async def stream_answer(
    channel: grpc.aio.Channel,
    request: tokenizer_pb2.GenerateRequest,
    answer: Answer,
    *,
    timeout_s: float | None = None,
) -> None:
    """Ask for a completion and write it to stdout and into `answer` as it comes, for `timeout_s` or to its end.

    Cancelling the task that waits for this cancels the call.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    try:
        async for response in tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request, timeout=timeout_s):
            answer.text += response.text
            answer.finish = response.finish
            sys.stdout.write(response.text)
            sys.stdout.flush()
    finally:
        # Also behind half an answer: what is told next begins a line.
        print(flush=True)


async def answer_once(channel: grpc.aio.Channel, prompt: str) -> None:
    """Stream a short greedy answer to the terminal, as a chat when the model has a template.

    Raises:
        grpc.aio.AioRpcError: a call failed.
    """
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    model = await stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
    request = tokenizer_pb2.GenerateRequest(text=prompt, sampling=_LAUNCHER_PROMPT)
    if model.has_chat_template:
        message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content=prompt)
        request.chat.CopyFrom(tokenizer_pb2.Chat(messages=[message]))
    answer = Answer()
    await stream_answer(channel, request, answer)
    print(f"\n{describe_finish(answer.finish)}", flush=True)


def describe_finish(finish: tokenizer_pb2.Finish) -> str:
    """One line for people: why the answer ended, its length and its pace."""
    reason = common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    text = f"[{finish.usage.num_completion_tokens} tokens, ended by {reason}"
    text += f"; first after {finish.ttft.ToTimedelta().total_seconds() * 1e3:.0f} ms"
    if finish.HasField("mean_tpot"):
        text += f", then one every {finish.mean_tpot.ToTimedelta().total_seconds() * 1e3:.1f} ms"
    return text + "]"


def _unsigned(bits: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not 0 <= value < 2**bits:
            raise argparse.ArgumentTypeError(f"{text} is no unsigned {bits}-bit number")
        return value

    parse.__name__ = "number"
    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to wait")
    return value
