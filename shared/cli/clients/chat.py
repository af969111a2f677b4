"""`lockstep chat`: a conversation in the terminal, or one turn per piped line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.cli.clients.client import NotTextError, check_text, describe_failure, run_client
from shared.cli.clients.conversation import Conversation
from shared.cli.clients.request_flags import add_client_flags, request_from
from shared.cli.clients.wrong_service import TOKENIZER, explain_wrong_service
from shared.cli.tls_flags import peer_of_client
from shared.network.rpc import Peer, make_channel
from shared.network.tls import Role
from shared.process.encoding import describe_locale

_HELP = """\
/system TEXT   set the system prompt; without TEXT, show it
/reset         forget the conversation but keep the system prompt
/help          show this help
Enter sends, Alt-Enter starts a new line, and the arrow keys recall earlier turns. To send a line that begins with a /,
put a space before it. Ctrl-C stops an answer; Ctrl-C twice, or Ctrl-D, exits."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lockstep chat",
        description="Talk to the model. Ctrl-C stops an answer; Ctrl-C twice, or Ctrl-D, exits. When stdin is a pipe, "
        "each line is a turn.",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    add_client_flags(parser)
    args = parser.parse_args(argv)
    try:
        request = request_from(args)
        check_text(args.system)
    except (NotTextError, UnicodeEncodeError):
        parser.error(f"the text of a flag is not UTF-8{describe_locale()}")
    peer = peer_of_client(parser, args, Role.TOKENIZER)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def converse() -> None:
        # The event loop does not run between answers, so reading a line needs no thread.
        with asyncio.Runner() as runner:
            channel = runner.run(_open(args.target, peer))
            try:
                conversation = Conversation(channel, request, args.system, args.timeout)
                (_talk if is_terminal else _answer_lines)(runner, channel, args.target, conversation)
            finally:
                runner.run(channel.close())

    return run_client(converse)


def _answer_lines(runner: asyncio.Runner, channel: grpc.aio.Channel, target: str, conversation: Conversation) -> None:
    """Stop at the first failure."""
    try:
        for line in sys.stdin:
            if line.strip():
                runner.run(_answer(channel, target, conversation, check_text(line.rstrip("\n"))))
    except UnicodeDecodeError as error:
        raise NotTextError(f"stdin is not UTF-8: {error}") from None


async def _answer(channel: grpc.aio.Channel, target: str, conversation: Conversation, turn: str) -> None:
    async with explain_wrong_service(channel, target, TOKENIZER):
        await conversation.answer(turn)


def _talk(runner: asyncio.Runner, channel: grpc.aio.Channel, target: str, conversation: Conversation) -> None:
    # Imported here because only a terminal needs the library, and importing it is slow.
    from shared.cli.clients.typed_turns import TypedTurns  # noqa: PLC0415

    model = runner.run(_find_model(channel, target))
    print(f"{model} on {target}. /help lists the commands, Ctrl-D exits.")
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
            print("Press Ctrl-C again to exit.")
        except grpc.aio.AioRpcError as error:
            print(f"error: {describe_failure(error)}", file=sys.stderr)
        except NotTextError as error:
            print(f"error: {error}", file=sys.stderr)


def _obey(line: str, conversation: Conversation) -> None:
    command, _, text = line.strip().partition(" ")
    if command == "/system" and text:
        conversation.system = text.strip()
    elif command == "/system":
        print(conversation.system or "no system prompt is set")
    elif command == "/reset":
        conversation.reset()
    elif command == "/help":
        print(_HELP)
    else:
        print(f"unknown command {command}; /help lists the commands")


async def _find_model(channel: grpc.aio.Channel, target: str) -> str:
    async with explain_wrong_service(channel, target, TOKENIZER):
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        info = await stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
        return str(info.model)


async def _open(target: str, peer: Peer | None) -> grpc.aio.Channel:
    # A channel belongs to the event loop that is running when it is created.
    return make_channel(target, peer=peer)
