"""`lockstep embed`: the vectors of texts, a line of JSON each."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.cli.clients.client import open_channel, run_client, texts_of
from services.cli.clients.key_flag import Metadata, metadata_of
from services.cli.clients.request_flags import add_call_flags, determinism_of, find_tokenizer, priority_of
from services.cli.clients.running_cells import Target
from services.cli.tls_flags import peer_of_client
from shared.flag_parser import FlagParser
from shared.network.rpc import Peer
from shared.network.tls import Role
from shared.process.encoding import describe_locale

# The vectors of so many are below the 4 MiB of a message, whatever the model.
_TEXTS_PER_CALL = 64


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(
        prog="lockstep embed",
        description="Make vectors of texts, with a cell that was started with --task embed. Each line is a text's "
        "vector, a JSON array.",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="without any, each line of stdin is one")
    parser.add_argument(
        "--input-type",
        choices=("query", "document"),
        help="what the texts are; a model may want a prompt before either",
    )
    parser.add_argument("--prompt-name", metavar="NAME", help="the model's prompt to put before each text, by its name")
    parser.add_argument("--dimensions", type=int, metavar="N", help="only the first N numbers, made as long as all")
    add_call_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.dimensions is not None and args.dimensions < 1:
        parser.error("--dimensions must be at least 1")
    try:
        texts = texts_of(args.texts)
        requests = [_request(args, texts[at : at + _TEXTS_PER_CALL]) for at in range(0, len(texts), _TEXTS_PER_CALL)]
    except UnicodeError:
        parser.error(f"a text is not UTF-8{describe_locale()}")
    if not requests:
        parser.error("there is no text")
    peer, metadata = peer_of_client(parser, args, Role.TOKENIZER), metadata_of(parser, args)
    target = find_tokenizer(args)
    return run_client(lambda: asyncio.run(_embed(target, peer, metadata, requests, args.timeout)))


def _request(args: argparse.Namespace, texts: Sequence[str]) -> tokenizer_pb2.EmbedRequest:
    return tokenizer_pb2.EmbedRequest(
        prompts={"prompts": [tokenizer_pb2.Prompt(text=text) for text in texts]},
        dimensions=args.dimensions,
        input_type=None if args.input_type is None else f"INPUT_TYPE_{args.input_type.upper()}",
        prompt_name=args.prompt_name,
        priority=priority_of(args),
        determinism=determinism_of(args),
        cache_salt=args.cache_salt,
    )


async def _embed(
    target: Target,
    peer: Peer | None,
    metadata: Metadata,
    requests: Sequence[tokenizer_pb2.EmbedRequest],
    timeout_s: float | None,
) -> None:
    async with open_channel(target, peer, metadata) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for request in requests:
            response = await stub.Embed(request, timeout=timeout_s, metadata=metadata)
            for embedding in response.embeddings:
                # The shortest that is the same float32.
                print(f"[{', '.join(f'{value:.9g}' for value in embedding.values)}]")
