"""`lockstep chat`: a conversation in the terminal, or one turn per piped line."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.cli.clients.client import NotTextError, check_text, describe_failure, explain_failure, run_client
from services.cli.clients.conversation import Conversation
from services.cli.clients.key_flag import Metadata, metadata_of
from services.cli.clients.request_flags import add_client_flags, find_tokenizer, request_from
from services.cli.clients.running_cells import Target
from services.cli.clients.word_wrap import WordWrap
from services.cli.extras import missing_packages
from services.cli.tls_flags import peer_of_client
from shared.flag_parser import FlagParser
from shared.network.rpc import Peer, make_channel
from shared.network.tls import Role
from shared.process.encoding import describe_locale

_HELP = """\
/system TEXT   set the system prompt; without TEXT, show it
/reset         forget the conversation but keep the system prompt
/help          show this help
Enter sends, Alt-Enter starts a new line, and the arrow keys recall turns, of earlier conversations too. To send a
line that begins with a /, put a space before it. Ctrl-C stops an answer; Ctrl-C twice, or Ctrl-D, exits."""


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(
        prog="lockstep chat",
        description="Talk to the model. Ctrl-C stops an answer; Ctrl-C twice, or Ctrl-D, exits. When stdin is a pipe, "
        "each line is a turn.",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    add_client_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        request = request_from(args)
        check_text(args.system)
    except (NotTextError, UnicodeEncodeError):
        parser.error(f"the text of a flag is not UTF-8{describe_locale()}")
    peer, metadata = peer_of_client(parser, args, Role.TOKENIZER), metadata_of(parser, args)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal and (problem := missing_packages("chat", ["chat"])):
        print(f"error: {problem}", file=sys.stderr)
        return 2

    target = find_tokenizer(args)

    def converse() -> None:
        # The event loop does not run between answers, so reading a line needs no thread.
        with asyncio.Runner() as runner:
            channel = runner.run(_open(target.address, peer))
            server = _Server(channel, target, metadata)
            try:
                wrap = WordWrap(lambda: shutil.get_terminal_size().columns) if is_terminal else None
                conversation = Conversation(channel, request, args.system, args.timeout, wrap, metadata)
                (_talk if is_terminal else _answer_lines)(runner, server, conversation)
            finally:
                runner.run(channel.close())

    return run_client(converse)


@dataclass(frozen=True, slots=True)
class _Server:
    """The tokenizer that answers."""

    channel: grpc.aio.Channel
    target: Target
    metadata: Metadata


def _answer_lines(runner: asyncio.Runner, server: _Server, conversation: Conversation) -> None:
    """Stop at the first failure."""
    try:
        for line in sys.stdin:
            if line.strip():
                runner.run(_answer(server, conversation, check_text(line.rstrip("\n"))))
    except UnicodeDecodeError as error:
        raise NotTextError(f"stdin is not UTF-8: {error}") from None


async def _answer(server: _Server, conversation: Conversation, turn: str) -> None:
    async with explain_failure(server.channel, server.target, server.metadata):
        await conversation.answer(turn)


def _talk(runner: asyncio.Runner, server: _Server, conversation: Conversation) -> None:
    # Imported here because only a terminal needs the library, and importing it is slow.
    from services.cli.clients.typed_turns import TypedTurns  # noqa: PLC0415

    model = runner.run(_find_model(server))
    print(f"{model} on {server.target.address}. /help lists the commands, Ctrl-D exits.")
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


async def _find_model(server: _Server) -> str:
    async with explain_failure(server.channel, server.target, server.metadata):
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(server.channel)
        info = await stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest(), metadata=server.metadata)
        return str(info.model)


async def _open(target: str, peer: Peer | None) -> grpc.aio.Channel:
    # A channel belongs to the event loop that is running when it is created.
    return make_channel(target, peer=peer)
