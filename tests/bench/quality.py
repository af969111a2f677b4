"""What quantised weights and KV caches cost in quality, on a CPU.

    python -m tests.bench.quality models/smollm2-135m-instruct-float32 --json quality.json
    python -m tests.bench.quality models/smollm2-135m-instruct-float32 --formats fp32 int8 --without-peers

Perplexity is that of a fixed public-domain text in chunks of 1024 tokens, each given the true tokens before it in its
chunk. Ours is computed by the worker's own model, as `--formats` says; llama.cpp's by files that it has quantised, and
ours of its Q4_K_M is beside it: of SmolLM2, and of a random Llama whose rows are multiples of 256, as K-quants want.
The reference of a format is fp32, or the same format with an ordinary KV cache.

SmolLM2's published file is 4-bit already, which flatters int4. So the mean Kullback-Leibler divergence from fp32, in
thousandths of a nat per token, is measured on a random Llama of 4 layers and hidden size 1024. Its weights follow
Student's t-distribution with 5 degrees of freedom, whose tails are as heavy as those of trained weights, and 1 % of the
channels of every norm are 10 times as large, as in trained models whose activations have outliers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer
from torch import Tensor

from services.worker.config import WorkerSettings
from services.worker.runner.start.build import build_model_runner
from services.worker.weights.importer import import_model
from shared.config import load_settings
from tests.bench.parts.public_text import public_text
from tests.bench.parts.report import Row, compare, limit, report
from tests.bench.peers.cpu_files import f16_gguf, small_gguf
from tests.bench.peers.environments import LLAMA_CPP, LeftOutError
from tests.bench.peers.protocol import start_process
from tests.support.models.outlier_llama import write_outlier_llama
from tests.support.models.paged_model import PagedModel
from tests.support.models.tiny_llama import TINY_CONFIG

CHUNK_TOKENS = 1024
QUICK_CHUNK_TOKENS = 128
# 65 536 tokens.
NUM_CHUNKS = 64
BLOCK_SIZE = 16
PEER_KINDS = ("q8_0", "q4_0", "q4_k_m")
# What we compute too, of llama.cpp's files; SmolLM2's rows of 576 columns are in Q5_0 and Q8_0 there.
COMMON_KIND = "q4_k_m"
# How much higher our perplexity may be: llama.cpp's activations have 8 bits too.
MOST_EXCESS_OF_A_FILE = 1.005
NUM_RANDOM_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Format:
    """What the worker stores, by its flags.

    Attributes:
        reference: The format that it is compared with; None for fp32.
        most_excess_percent: How much higher than the reference's its perplexity may be.
    """

    flags: tuple[str, ...]
    reference: str | None = "fp32"
    most_excess_percent: float | None = None


FORMATS = {
    "fp32": Format(("--ops-backend=native", "--quantization=none", "--dtype=float32"), reference=None),
    "bf16": Format(("--ops-backend=native", "--quantization=none", "--dtype=bfloat16")),
    "int8": Format(("--ops-backend=native", "--quantization=int8"), most_excess_percent=1.0),
    "int4": Format(("--ops-backend=native", "--quantization=int4"), most_excess_percent=6.0),
    "int8, int8 KV": Format(
        ("--ops-backend=native", "--quantization=int8", "--kv-cache-dtype=int8"),
        reference="int8",
        most_excess_percent=0.3,
    ),
}


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    args = _parse_args()
    chunks = _text_chunks(args.model_dir, args.chunks)[: 1 if args.quick else None]
    if args.quick:
        chunks = [chunk[:QUICK_CHUNK_TOKENS] for chunk in chunks]
    rows = list(_perplexity_rows(args, chunks))
    if not args.without_peers:
        rows += _peer_rows(args.model_dir, chunks, rows[0].value)
    rows += _divergence_rows(args)
    print(f"{len(chunks)} chunks of {len(chunks[0])} tokens")
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="SmolLM2-135M: the peers' files are of this model")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="in this order")
    parser.add_argument(
        "--worker-flag", action="append", default=[], help="one more flag of the worker, in all formats"
    )
    parser.add_argument("--chunks", type=int, default=NUM_CHUNKS, help="length of the text, in chunks")
    parser.add_argument("--quick", action="store_true", help=f"only one chunk of {QUICK_CHUNK_TOKENS} tokens")
    parser.add_argument("--without-peers", action="store_true", help="measure only ours; nothing is installed")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if args.formats[0] != "fp32":
        parser.error("--formats must begin with fp32, the reference")
    return args


def _text_chunks(model_dir: Path, num_chunks: int) -> list[list[int]]:
    token_ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(public_text()).ids
    chunks = [token_ids[first : first + CHUNK_TOKENS] for first in range(0, len(token_ids), CHUNK_TOKENS)]
    return chunks[: min(num_chunks, len(token_ids) // CHUNK_TOKENS)]


class WorkerModel:
    """A model as the worker loads it with some flags."""

    def __init__(self, model_dir: Path, flags: Sequence[str]) -> None:
        settings = load_settings(WorkerSettings, [f"--model-dir={model_dir}", "--device=cpu", *flags])
        self._runner = build_model_runner(settings, lambda _: None)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """The logits after each token, [num_tokens, vocabulary], float32."""
        num_blocks = math.ceil(len(token_ids) / BLOCK_SIZE)
        paged = PagedModel(
            self._runner._rank.model, self._runner._rank.ops, num_blocks=num_blocks, block_size=BLOCK_SIZE
        )
        return paged.prefill_all(paged.add(token_ids)).float()


def _perplexity_rows(args: argparse.Namespace, chunks: Sequence[Sequence[int]]) -> Iterator[Row]:
    name_to_perplexity: dict[str, float] = {}
    for name in args.formats:
        print(f"perplexity, {name} …", file=sys.stderr)
        form = FORMATS[name]
        model = WorkerModel(args.model_dir, [*form.flags, *args.worker_flag])
        value = _perplexity(model, chunks)
        name_to_perplexity[name] = value
        if form.reference in name_to_perplexity:
            reference = name_to_perplexity[form.reference]
            yield compare(f"perplexity, {name}, beside {form.reference}", value, "", reference=reference)
            yield _excess_row(name, (value / reference - 1) * 100, form)
        else:
            yield Row(f"perplexity, {name}", value, "")


def _perplexity(model: WorkerModel, chunks: Sequence[Sequence[int]]) -> float:
    return math.exp(sum(_mean_loss(model.logits(chunk), chunk) for chunk in chunks) / len(chunks))


def _excess_row(name: str, percent: float, form: Format) -> Row:
    metric = f"perplexity, {name}, above {form.reference}"
    if form.most_excess_percent is None:
        return Row(metric, percent, "%")
    return limit(metric, percent, "%", at_most=form.most_excess_percent)


def _mean_loss(logits: Tensor, token_ids: Sequence[int]) -> float:
    """The mean negative log-likelihood of all tokens but the first, in nats."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])))


def _peer_rows(model_dir: Path, chunks: Sequence[Sequence[int]], fp32_perplexity: float) -> Iterator[Row]:
    """llama.cpp's files; says on stdout why they are left out if they are."""
    for kind in PEER_KINDS:
        if (peer := _peer_perplexity(f16_gguf, kind, chunks)) is None:
            continue
        path, value = peer
        yield compare(f"perplexity, llama.cpp {kind.upper()}, beside our fp32", value, "", reference=fp32_perplexity)
        if kind == COMMON_KIND:
            yield _same_file_row(path, chunks, value)
    if (peer := _peer_perplexity(lambda: small_gguf(model_dir), COMMON_KIND, chunks, " of a random Llama")) is not None:
        path, value = peer
        yield _same_file_row(path, chunks, value, " of a random Llama")


def _peer_perplexity(
    make_source: Callable[[], Path], kind: str, chunks: Sequence[Sequence[int]], of: str = ""
) -> tuple[Path, float] | None:
    """llama.cpp's of a file that it has quantised, and the file's source; None if it is left out."""
    name = f"llama.cpp {kind.upper()}"
    print(f"perplexity, {name}{of} …", file=sys.stderr)
    try:
        source = make_source()
        with start_process(name, LLAMA_CPP.python(), "tests.bench.peers.cpu_llama_cpp") as process:
            process.start("perplexity", gguf_path=str(source), kind=kind, chunks=chunks)
            return source, float(process.run()[0]["perplexity"])
    except (LeftOutError, RuntimeError) as error:
        print(f"left out: {name}{of}: {str(error).splitlines()[-1]}")
        return None


def _same_file_row(source: Path, chunks: Sequence[Sequence[int]], reference: float, of: str = "") -> Row:
    ours = _perplexity_of_file(source.with_suffix(f".{COMMON_KIND}.gguf"), chunks)
    title = f"perplexity, ours, beside llama.cpp {COMMON_KIND.upper()}{of}, the same file"
    return compare(title, ours, "", reference=reference, at_most=MOST_EXCESS_OF_A_FILE)


def _perplexity_of_file(gguf_path: Path, chunks: Sequence[Sequence[int]]) -> float:
    print(f"perplexity, {gguf_path.name} …", file=sys.stderr)
    with TemporaryDirectory() as directory:
        model_dir = Path(directory) / "model"
        import_model(gguf_path, model_dir)
        return _perplexity(WorkerModel(model_dir, FORMATS["int8"].flags), chunks)


def _divergence_rows(args: argparse.Namespace) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(1)
    with TemporaryDirectory() as directory:
        model_dir = write_outlier_llama(Path(directory))
        size = (1, QUICK_CHUNK_TOKENS) if args.quick else (NUM_RANDOM_CHUNKS, CHUNK_TOKENS)
        chunks = torch.randint(TINY_CONFIG["vocab_size"], size, generator=generator).tolist()
        expected: list[Tensor] = []
        for name in args.formats:
            print(f"divergence, {name} …", file=sys.stderr)
            model = WorkerModel(model_dir, [*FORMATS[name].flags, *args.worker_flag])
            log_probs = [model.logits(chunk).log_softmax(-1) for chunk in chunks]
            if FORMATS[name].reference is None:
                expected = log_probs
            else:
                yield Row(f"divergence from fp32, {name}", _mean_divergence(expected, log_probs) * 1e3, "mnats")


def _mean_divergence(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """The mean over tokens of the divergence of `actual` from `expected`, both log-probabilities."""
    pairs = zip(expected, actual, strict=True)
    return sum(float((theirs.exp() * (theirs - ours)).sum(-1).mean()) for theirs, ours in pairs) / len(expected)


if __name__ == "__main__":
    main()
