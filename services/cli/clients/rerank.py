"""`lockstep rerank`: documents, the ones that fit a query best first."""

from __future__ import annotations

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


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(
        prog="lockstep rerank",
        description="Rank documents by how well they fit a query, with a cell whose model is a reranker. Each line has "
        "the score, 0 to 1, the document's number, from 0, and its text.",
    )
    parser.add_argument("query", metavar="QUERY", help="what is looked for")
    parser.add_argument(
        "documents", nargs="*", metavar="DOCUMENT", help="at most 1000; without any, each line of stdin is one"
    )
    parser.add_argument("--instruction", default="", metavar="TEXT", help="what makes a document fit")
    parser.add_argument("--top-n", type=int, metavar="N", help="show only the N best")
    add_call_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.top_n is not None and args.top_n < 1:
        parser.error("--top-n must be at least 1")
    try:
        documents = texts_of(args.documents)
        request = tokenizer_pb2.ScoreRequest(
            pairs=tokenizer_pb2.ScorePairs(queries=[args.query], documents=documents, instruction=args.instruction),
            priority=priority_of(args),
            determinism=determinism_of(args),
            cache_salt=args.cache_salt,
        )
    except UnicodeError:
        parser.error(f"the query or a document is not UTF-8{describe_locale()}")
    peer, metadata = peer_of_client(parser, args, Role.TOKENIZER), metadata_of(parser, args)
    target = find_tokenizer(args)
    return run_client(lambda: asyncio.run(_rank(target, peer, metadata, request, args.timeout, args.top_n)))


async def _rank(
    target: Target,
    peer: Peer | None,
    metadata: Metadata,
    request: tokenizer_pb2.ScoreRequest,
    timeout_s: float | None,
    top_n: int | None,
) -> None:
    async with open_channel(target, peer, metadata) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        response = await stub.Score(request, timeout=timeout_s, metadata=metadata)
    # Not by the probabilities: those of good documents may all be 1.
    odds = [item.logprobs[0] - item.logprobs[1] for item in response.items]
    for index in sorted(range(len(odds)), key=lambda number: -odds[number])[:top_n]:
        # A document is a line here, too.
        text = " ".join(request.pairs.documents[index].split())
        print(f"{response.items[index].score:.6f}\t{index}\t{text}")
