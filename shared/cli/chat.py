"""`lockstep chat`: a conversation in the terminal, or one user turn per line of a piped stdin."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.cli.client import NotTextError, check_text, describe_failure, run_client
from shared.cli.conversation import Conversation
from shared.cli.request_flags import add_client_flags, request_from
from shared.cli.wrong_service import TOKENIZER, explain_wrong_service
from shared.rpc import make_channel

_HELP = """\
/system TEXT   set how the model is to behave; without TEXT, show it
/reset         forget the conversation, but not that
/help          show this
Enter sends, Alt-Enter begins a line, and the arrow keys bring back what was sent. A space before the / sends a line as
it is. Ctrl-C stops an answer, twice it leaves, as Ctrl-D does."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lockstep chat",
        description="Talk to the model. Ctrl-C stops an answer, twice it leaves, as Ctrl-D does. From a pipe, each "
        "line is a turn.",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="how the model is to behave")
    add_client_flags(parser)
    args = parser.parse_args(argv)
    try:
        request = request_from(args)
        check_text(args.system)
    except (NotTextError, UnicodeEncodeError):
        parser.error("a flag's text is not UTF-8")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def converse() -> None:
        # Between answers the event loop is not run, so that reading a line needs no thread.
        with asyncio.Runner() as runner:
            channel = runner.run(_open(args.target))
            try:
                conversation = Conversation(channel, request, args.system, args.timeout)
                (_talk if is_terminal else _answer_lines)(runner, channel, args.target, conversation)
            finally:
                runner.run(channel.close())

    return run_client(converse)


def _answer_lines(runner: asyncio.Runner, channel: grpc.aio.Channel, target: str, conversation: Conversation) -> None:
    """Answer every line of stdin; the first failure ends it."""
    try:
        for line in sys.stdin:
            if line.strip():
                runner.run(_answer(channel, target, conversation, check_text(line.rstrip("\n"))))
    except UnicodeDecodeError as error:
        raise NotTextError(f"stdin is no text: {error}") from None


async def _answer(channel: grpc.aio.Channel, target: str, conversation: Conversation, turn: str) -> None:
    async with explain_wrong_service(channel, target, TOKENIZER):
        await conversation.answer(turn)


def _talk(runner: asyncio.Runner, channel: grpc.aio.Channel, target: str, conversation: Conversation) -> None:
    """Answer what a person types, until that one leaves."""
    # Only a terminal needs the library, which takes long to import.
    from shared.cli.typed_turns import TypedTurns  # noqa: PLC0415

    model = runner.run(_find_model(channel, target))
    print(f"{model} on {target}. /help lists the commands, Ctrl-D leaves.")
    turns = TypedTurns()
    has_interrupted = False
    while True:
        try:
            turn = runner.run(turns.read())
            if turn is None:
                return
            has_interrupted = False
            check_text(turn)
            if turn.startswith("/"):
                _obey(turn, conversation)
            elif turn.strip():
                runner.run(conversation.answer(turn))
        except KeyboardInterrupt:
            if has_interrupted:
                raise
            has_interrupted = True
            print("Ctrl-C again leaves.")
        except grpc.aio.AioRpcError as error:
            print(f"error: {describe_failure(error)}", file=sys.stderr)
        except NotTextError as error:
            print(f"error: {error}", file=sys.stderr)


def _obey(line: str, conversation: Conversation) -> None:
    """Do what a line says that begins with a slash."""
    command, _, text = line.strip().partition(" ")
    if command == "/system" and text:
        conversation.system = text.strip()
    elif command == "/system":
        print(conversation.system or "nothing is set")
    elif command == "/reset":
        conversation.reset()
    elif command == "/help":
        print(_HELP)
    else:
        print(f"there is no {command}; /help lists the commands")


async def _find_model(channel: grpc.aio.Channel, target: str) -> str:
    """The name of the model that answers.

    Raises:
        grpc.aio.AioRpcError: none does.
        WrongServiceError: another service does.
    """
    async with explain_wrong_service(channel, target, TOKENIZER):
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        info = await stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
        return str(info.model)


async def _open(target: str) -> grpc.aio.Channel:
    # A channel belongs to the event loop that runs when it is made.
    return make_channel(target)
