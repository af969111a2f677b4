"""Scores and vectors of many items on a CPU, beside the same tokens without what the items share, and beside a peer.

    python -m tests.bench.items models/smollm2-135m-instruct-float32 --json items.json

A figure is that of the best repeat; sides take turns, repeat by repeat.

    scores   documents behind one query: one `Score` call, whose items share the query in the cache, beside as many
             prompts that are as long as what each item computes, and as many of them at once
    vectors  short texts: one `Embed` call beside sentence-transformers with its best size of a batch, in the same
             dtype; the first run makes its environment in .cache/, 2 GB
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.server.items import MAX_IN_FLIGHT
from shared.model_files.model_dir import CHAT_TEMPLATE
from tests.bench.parts.load import measure
from tests.bench.parts.public_text import public_text
from tests.bench.parts.report import Row, compare, report, run_sections
from tests.bench.parts.tokens import PromptSource
from tests.bench.peers.cpu_sentences import start_sentences
from tests.bench.peers.environments import LeftOutError
from tests.support.cells.cell import start_cell
from tests.support.tokenizer.embedders import LAST, write_embedder_files

SCORES_TARGET = 1.1
VECTORS_TARGET = 1.0
BATCH_SIZES = (8, 32, 128)
DTYPES = ("float32", "bfloat16")
WORDS_PER_TEXT = 16
_LABELS = (1000, 1001)
_GREEDY = common_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--query-tokens", type=int, default=512)
    parser.add_argument("--document-tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-peers", action="store_true", help="measure only our side of `vectors`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report(run_sections(SECTIONS, args.only, args), args.json)


def measure_scores(args: argparse.Namespace) -> Iterator[Row]:
    """One call of scores beside prompts that share nothing."""
    queries, documents = PromptSource(args.query_tokens), PromptSource(args.document_tokens, seed=2)
    firsts = PromptSource(args.query_tokens + args.document_tokens, seed=3)
    count, times = args.documents, []
    with start_cell(args.model_dir) as cell:
        for _ in range(args.repeats):
            [query] = queries.take(1)
            items = [_tokens([*query, *document]) for document in documents.take(count)]
            request = tokenizer_pb2.ScoreRequest(
                prompts=tokenizer_pb2.PromptList(prompts=items), label_token_ids=_LABELS
            )
            scores_s = _call(cell.address, partial(_score, request))
            others = [*firsts.take(1), *documents.take(count - 1)]
            times.append((scores_s, asyncio.run(_generate_s(cell.address, others))))
    ours, others_s = map(min, zip(*times, strict=True))
    title = f"{count} documents of {args.document_tokens} tokens behind a query of {args.query_tokens}"
    yield compare(title, ours * 1e3, "ms", reference=others_s * 1e3, at_most=SCORES_TARGET)


def measure_vectors(args: argparse.Namespace) -> Iterator[Row]:
    """One call of vectors beside sentence-transformers."""
    words = public_text().split()
    starts = range(0, args.texts * WORDS_PER_TEXT, WORDS_PER_TEXT)
    texts = [" ".join(words[start : start + WORDS_PER_TEXT]) for start in starts]
    prompts = [tokenizer_pb2.Prompt(text=text) for text in texts]
    request = tokenizer_pb2.EmbedRequest(prompts=tokenizer_pb2.PromptList(prompts=prompts))
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _write_embedder(args.model_dir.resolve(), Path(folder) / args.model_dir.name)
        for dtype in DTYPES:
            with start_cell(model_dir, "--task=embed", f"--worker.dtype={dtype}", "--no-enable-prefix-caching") as cell:
                ours, theirs = _take_turns(cell.address, request, args, model_dir, dtype, texts)
            title = f"vectors of {args.texts} texts of {WORDS_PER_TEXT} words, {dtype}"
            if theirs is None:
                yield Row(title, len(texts) / ours, "texts/s")
            else:
                yield compare(
                    title, len(texts) / ours, "texts/s", reference=len(texts) / theirs, at_least=VECTORS_TARGET
                )


def _take_turns(
    address: str,
    request: tokenizer_pb2.EmbedRequest,
    args: argparse.Namespace,
    model_dir: Path,
    dtype: str,
    texts: list[str],
) -> tuple[float, float | None]:
    """The least seconds of ours, and of the peer with any size of a batch; None without it."""

    def ours() -> float:
        return _call(address, partial(_embed, request))

    if args.without_peers:
        return min(ours() for _ in range(args.repeats)), None
    try:
        with start_sentences(model_dir, dtype) as sentences:
            times = [
                (ours(), min(sentences.encode_s(texts, size) for size in BATCH_SIZES)) for _ in range(args.repeats)
            ]
    except LeftOutError as error:
        print(f"left out: {error}", file=sys.stderr)
        return min(ours() for _ in range(args.repeats)), None
    return min(each[0] for each in times), min(each[1] for each in times)


def _write_embedder(source: Path, target: Path) -> Path:
    """The model's directory with a recipe: the last token's vector, normalised."""
    target.mkdir()
    for file in source.iterdir():
        # The manifest has the digest of the template.
        if file.name not in (CHAT_TEMPLATE, "manifest.json"):
            (target / file.name).symlink_to(file)
    write_embedder_files(target, pooling=LAST)
    return target


def _tokens(token_ids: list[int]) -> tokenizer_pb2.Prompt:
    return tokenizer_pb2.Prompt(tokens=common_pb2.TokenSequence(token_ids=token_ids))


def _score(request: tokenizer_pb2.ScoreRequest, stub: tokenizer_pb2_grpc.TokenizerServiceStub) -> None:
    stub.Score(request)


def _embed(request: tokenizer_pb2.EmbedRequest, stub: tokenizer_pb2_grpc.TokenizerServiceStub) -> None:
    stub.Embed(request)


def _call(address: str, work: Callable[[tokenizer_pb2_grpc.TokenizerServiceStub], object]) -> float:
    """How long a call takes."""
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        grpc.channel_ready_future(channel).result()
        started = time.perf_counter()
        work(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
        return time.perf_counter() - started


async def _generate_s(address: str, prompts: list[list[int]]) -> float:
    """How long as many prompts at once take as a call has items in the cell, one token each."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        started = time.perf_counter()
        await measure(stub, prompts[:1], concurrency=1, sampling=_GREEDY)
        await measure(stub, prompts[1:], concurrency=MAX_IN_FLIGHT, sampling=_GREEDY)
        return time.perf_counter() - started


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "scores": measure_scores,
    "vectors": measure_vectors,
}

if __name__ == "__main__":
    main()
