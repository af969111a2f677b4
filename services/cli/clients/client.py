"""What the terminal clients share."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.cli.clients.key_flag import KeyRefusedError, Metadata, explain_refused_key
from services.cli.clients.running_cells import NoCellError, Target, explain_no_cell
from services.cli.clients.word_wrap import WordWrap
from services.cli.clients.wrong_service import TOKENIZER, WrongServiceError, explain_wrong_service
from shared.network.rpc import Peer, make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.process.encoding import describe_locale, is_text

_INTERRUPTED = 130
_LAUNCHER_PROMPT = common_pb2.SamplingParams(temperature=0.0, max_tokens=256)


@dataclass(slots=True)
class Answer:
    """The answer received so far."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finish: tokenizer_pb2.Finish = field(default_factory=tokenizer_pb2.Finish)

    def add(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Append the next response."""
        self.text += response.text
        self.reasoning += response.reasoning
        self.logprobs += response.logprobs
        self.finish = response.finish


class NotTextError(Exception):
    """Some input is not UTF-8."""


def check_text(text: str) -> str:
    """Return `text` unchanged.

    Raises:
        NotTextError: it has bytes that are not UTF-8, which Python keeps as lone surrogates.
    """
    if not is_text(text):
        raise NotTextError(f"the input is not UTF-8{describe_locale()}")
    return text


def texts_of(arguments: Sequence[str]) -> list[str]:
    """A command's texts: its arguments, or else the lines of stdin that are not empty.

    Raises:
        UnicodeError: stdin is not text.
    """
    return list(arguments) or [line.removesuffix("\n") for line in sys.stdin if line.strip()]


@contextlib.asynccontextmanager
async def explain_failure(channel: grpc.aio.Channel, target: Target, metadata: Metadata) -> AsyncIterator[None]:
    """Explain a failed call of the tokenizer service.

    Raises:
        NoCellError: no cell is there.
        KeyRefusedError: the client's key is refused, or missing.
        WrongServiceError: another service answers.
    """
    async with (
        explain_no_cell(target),
        explain_refused_key(target.address, metadata),
        explain_wrong_service(channel, target.address, TOKENIZER),
    ):
        yield


@contextlib.asynccontextmanager
async def open_channel(target: Target, peer: Peer | None, metadata: Metadata) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a tokenizer service, whose failed calls are explained; raises as `explain_failure`."""
    async with make_channel(target.address, peer=peer) as channel, explain_failure(channel, target, metadata):
        yield channel


def run_client(body: Callable[[], None]) -> int:
    """Run a client command; returns the exit code.

    Reports a failed call on stderr; Ctrl-C and a closed stdout end it quietly.
    """
    try:
        body()
        sys.stdout.flush()
    except grpc.aio.AioRpcError as error:
        print(f"error: {describe_failure(error)}", file=sys.stderr)
        return 1
    except (KeyRefusedError, NoCellError, NotTextError, WrongServiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough, as with `head`.
        abandon_stdout()
    return 0


def abandon_stdout() -> None:
    """Redirect stdout, whose reader is gone, to /dev/null: Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe_failure(error: grpc.aio.AioRpcError) -> str:
    """`STATUS REASON: message`, or without a reason."""
    status = status_from_rpc_error(error)
    names = (error.code().name, reason_of(status))
    return f"{' '.join(name for name in names if name)}: {status.message}"


async def stream_answer(
    channel: grpc.aio.Channel,
    request: tokenizer_pb2.GenerateRequest,
    answer: Answer,
    *,
    timeout_s: float | None = None,
    metadata: Metadata = (),
    wrap: WordWrap | None = None,
) -> None:
    """Request a completion, writing it to stdout and into `answer` as it arrives.

    Cancelling the task cancels the call.

    Args:
        channel: One to the tokenizer.
        request: The request.
        answer: What has been received of it.
        timeout_s: When to give up; None means never.
        metadata: What the call sends beside the request.
        wrap: Breaks the lines for a terminal; None writes the text as it is.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    try:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        async for response in stub.Generate(request, timeout=timeout_s, metadata=metadata):
            answer.add(response)
            # Reasoning goes to stderr, so that a pipe on stdout receives the answer alone.
            for text, file in ((response.reasoning, sys.stderr), (response.text, sys.stdout)):
                file.write(wrap.add(text) if wrap is not None and file.isatty() else text)
                file.flush()
    finally:
        # After a partial answer too: the next message starts on a new line.
        print("" if wrap is None else wrap.end(), flush=True)
    note_recovery(answer.finish)


async def answer_once(channel: grpc.aio.Channel, prompt: str, metadata: Metadata = ()) -> None:
    """Stream a short greedy answer to the terminal, as a chat if the model has a template.

    Raises:
        grpc.aio.AioRpcError: a call failed.
    """
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    model = await stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest(), metadata=metadata)
    request = tokenizer_pb2.GenerateRequest(text=prompt, sampling=_LAUNCHER_PROMPT)
    if model.has_chat_template:
        message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content=prompt)
        request.chat.CopyFrom(tokenizer_pb2.Chat(messages=[message]))
    answer = Answer()
    await stream_answer(channel, request, answer, metadata=metadata)
    print(f"\n{describe_finish(answer.finish)}", flush=True)


def note_recovery(finish: tokenizer_pb2.Finish) -> None:
    """Report a resume on stderr, and whether the bytes could differ."""
    if finish.HasField("recovery"):
        count, is_exact = finish.recovery.resume_count, finish.recovery.resume_exact
        times = "once" if count == 1 else f"{count} times"
        verdict = "is" if is_exact else "may not be"
        print(f"note: resumed {times} after a failure; the answer {verdict} what it would have been", file=sys.stderr)


def describe_finish(finish: tokenizer_pb2.Finish) -> str:
    """One line: why the answer ended, its length and its pace: the tokens per second after the first one."""
    reason = common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    text = f"[{finish.usage.num_completion_tokens} tokens, ended by {reason}"
    text += f"; first after {finish.ttft.ToTimedelta().total_seconds() * 1e3:.0f} ms"
    if finish.HasField("mean_tpot") and (tpot_s := finish.mean_tpot.ToNanoseconds() / 1e9):
        text += f", then one every {tpot_s * 1e3:.1f} ms, {1 / tpot_s:.1f} tokens/s"
    return text + "]"


def describe_logprobs(logprobs: Sequence[common_pb2.PositionLogprobs]) -> str:
    """A line per token: its log-probability and text, then the likeliest tokens."""

    def describe(entry: common_pb2.TokenLogprob) -> str:
        return f"{entry.logprob:8.3f} {entry.text!r}"

    return "\n".join("  ".join(map(describe, [position.token, *position.top])) for position in logprobs)
