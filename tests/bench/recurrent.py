"""Recurrent layers on a CPU: a random Qwen3.5 of half a billion weights, beside a dense Qwen3, and beside llama.cpp.

    python -m tests.bench.recurrent --json recurrent.json
    python -m tests.bench.recurrent --formats int8 int4 bf16 --without-peers

The dense model has as many weights. Both run in this process, on the worker's model runner alone, and take turns of a
few steps, so that they meet the same machine. The figures with targets are by processor time, of all threads, which
other processes hardly change; the wall-clock time is beside them. A figure is that of the best turn, since other work
on the machine only slows.

    decode       tokens, and what a step moves: weights, keys and values, and each row's state twice: it is written too
    prefill      one long prompt
    checkpoints  requests that share nothing, planned by the scheduler's engine, with states saved and without
    peer         the Qwen3.5 in int8 beside llama.cpp's Q8_0: output tokens per second of wall-clock time, with prefill
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.scheduler.core.policy import CacheSettings, SchedulerPolicy
from services.worker.config import WorkerSettings
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from shared.step.step import EnteringSequence
from tests.bench.cpu_peers import take_turns
from tests.bench.parts.hybrid_models import DENSE, FORMAT_TO_BYTES, HYBRID, ModelReads, small
from tests.bench.parts.report import Row, compare, report, run_sections
from tests.bench.parts.tokens import PromptSource
from tests.bench.peers.cpu_generation import Generate, Loads
from tests.bench.peers.cpu_peers import LLAMA_CPP_Q8_0
from tests.bench.peers.environments import LeftOutError
from tests.bench.peers.hybrid_files import hybrid_gguf
from tests.support.scheduler.runner_cell import RunnerDriver
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

# The least tokens of one row, moved bytes of several, and prefilled tokens, relative to the dense model.
ONE_ROW_TARGET = 1.0
MOVED_TARGET = 1.0
PREFILL_TARGET = 0.7
# The least tokens where states are saved, relative to where none is.
CHECKPOINTS_TARGET = 0.97
# The least tokens/s relative to llama.cpp, by the number of requests.
PEER_TARGETS = {1: 1.1, 8: 1.5}

BLOCK_SIZE = 16
NUM_CHECKPOINTS = 16
MAX_STEP_TOKENS = 2048
CONTEXT_LENGTH = 2048
KV_CACHE_GIB = 2.0
FORMAT_TO_SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32", "quantization": "none"},
    "bf16": {"dtype": "bfloat16", "quantization": "none"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one turn, of processors and by the clock."""

    cpu_s: float
    wall_s: float


class Model:
    """One of the two models in one format of weights, on its `runner`."""

    def __init__(self, config: dict[str, Any], form: str, num_threads: int | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            settings = WorkerSettings(
                model_dir=Path(folder),
                load_format="dummy",
                kv_cache_memory_gib=KV_CACHE_GIB,
                num_threads=num_threads,
                **FORMAT_TO_SETTINGS[form],
            )
            self.runner: ModelRunner = build_model_runner(settings, lambda _: None)
        self._config = config
        self._form = form

    def begin(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> None:
        """Begin an epoch with nothing but these prompts, not yet computed."""
        self.runner.attach(block_size=BLOCK_SIZE, max_num_seqs=len(prompts), max_num_batched_tokens=MAX_STEP_TOKENS)
        self._entering = list(_enters(prompts, num_output_tokens))

    def prefill(self, *, leave: Sequence[int] = ()) -> None:
        """Compute the prompts, as many in a step as may be; sequences of the slots in `leave` leave before."""
        per_step = max(1, MAX_STEP_TOKENS // self._entering[0].num_prompt_tokens)
        for first in range(0, len(self._entering), per_step):
            self.runner.run_step(prefill_step(*self._entering[first : first + per_step], leave=leave))

    def decode(self, num_steps: int) -> None:
        """Compute the next tokens of all sequences."""
        for _ in range(num_steps):
            self.runner.run_step(decode_step())

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """See `Engine`; beginning an epoch is not included."""
        self.begin(prompts, num_output_tokens)
        started_at = time.perf_counter()
        self.prefill()
        self.decode(num_output_tokens - 1)
        return time.perf_counter() - started_at

    def moved_gb(self, num_rows: int, num_tokens: float) -> float:
        """What a step of rows with this many tokens each reads and writes; an epoch has begun."""
        runner = self.runner
        per_token = runner.kv_cache_bytes / (runner.num_blocks * BLOCK_SIZE)
        sizes = ModelReads.of(self._config, kv_bytes_per_token=per_token, state_bytes=runner.state_bytes_per_slot)
        return sizes.step_bytes(self._form, num_rows=num_rows, num_tokens=num_tokens) / 1e9


class Bench:
    """The measurements of one run. `left_out` says why a peer was not measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.left_out = ""
        self._args = args
        self._hybrid, self._dense = (small(config) if args.quick else config for config in (HYBRID, DENSE))

    def measure_decode(self) -> Iterator[Row]:
        """Both models' decode steps, by format and number of rows."""
        for form in self._args.formats:
            models = self._models(form)
            for num_rows in self._args.rows:
                yield from self._measure_rows(form, num_rows, models)

    def measure_prefill(self) -> Iterator[Row]:
        """Both models' time for one prompt, by format."""
        count = self._args.prefill
        for form in self._args.formats:
            models = self._models(form)
            for model in models:
                model.begin(PromptSource(count).take(1), 1)
                model.prefill()
            hybrid, dense = self._take_turns([partial(model.prefill, leave=[0]) for model in models])
            title = f"{form}, prefill of {count}"
            yield from _token_rows(title, count, hybrid, dense, at_least=PREFILL_TARGET)

    def measure_checkpoints(self) -> Iterator[Row]:
        """The scheduler over the hybrid model, with states saved and without."""
        args = self._args
        runner = Model(self._hybrid, "int8", args.num_threads).runner
        source = PromptSource(args.prompt_tokens)

        def serve(*, has_checkpoints: bool) -> None:
            driver = RunnerDriver(
                runner,
                num_blocks=args.requests * -(-(args.prompt_tokens + args.answer_tokens) // BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                context_length=CONTEXT_LENGTH,
                policy=SchedulerPolicy(max_num_seqs=args.requests),
                depth=2,
                enable_prefix_caching=has_checkpoints,
                num_checkpoint_slots=NUM_CHECKPOINTS if has_checkpoints else 0,
                state_checkpoint_interval=CacheSettings().state_checkpoint_interval,
            )
            for handle, prompt in enumerate(source.take(args.requests)):
                driver.submit(handle, prompt, max_tokens=args.answer_tokens)
            driver.run()
            assert all(len(choice.tokens) == args.answer_tokens for choice in driver.choices.values())

        # Kernels are captured.
        serve(has_checkpoints=True)
        with_states, without = self._take_turns([partial(serve, has_checkpoints=each) for each in (True, False)])
        title = f"int8, {args.requests} answers of {args.answer_tokens}, states saved"
        num_tokens = args.requests * args.answer_tokens
        yield from _token_rows(title, num_tokens, with_states, without, at_least=CHECKPOINTS_TARGET)

    def measure_peer(self) -> Iterator[Row]:
        """The hybrid model beside llama.cpp."""
        if self._args.without_peers:
            return
        loads = Loads(tuple(PEER_TARGETS), self._args.prompt_tokens, self._args.output_tokens)
        try:
            with LLAMA_CPP_Q8_0.start({"gguf_path": str(hybrid_gguf(self._hybrid)), "kind": "q8_0"}, loads) as peer:
                ours = Generate([Model(self._hybrid, "int8", self._args.num_threads)], loads)
                runs = {"ours": ours.run, "peer": lambda: peer.run()[0]}
                figures = take_turns(runs, self._args.repeats)
        except LeftOutError as error:
            self.left_out = f"left out: {LLAMA_CPP_Q8_0.name}: {error}"
            return
        for count, target in PEER_TARGETS.items():
            value, reference = (figures[side][str(count)] for side in ("ours", "peer"))
            title = f"int8, {count} requests, beside {LLAMA_CPP_Q8_0.name}"
            yield compare(title, value, "tokens/s", reference=reference, at_least=target)

    def _models(self, form: str) -> list[Model]:
        return [Model(config, form, self._args.num_threads) for config in (self._hybrid, self._dense)]

    def _measure_rows(self, form: str, num_rows: int, models: Sequence[Model]) -> Iterator[Row]:
        num_prompt, steps = self._args.prompt_tokens, self._args.steps
        num_output = steps * (self._args.repeats + 1)
        for model in models:
            model.begin(PromptSource(num_prompt).take(num_rows), num_output)
            model.prefill()
            # Kernels are captured.
            model.decode(2)
        hybrid, dense = self._take_turns([partial(model.decode, steps) for model in models])
        title = f"{form}, decode of {num_rows}"
        target = ONE_ROW_TARGET if num_rows == 1 else None
        yield from _token_rows(title, num_rows * steps, hybrid, dense, at_least=target)
        value, reference = (
            model.moved_gb(num_rows, num_prompt + num_output / 2) * steps / cost.cpu_s
            for model, cost in zip(models, (hybrid, dense), strict=True)
        )
        target = None if num_rows == 1 else MOVED_TARGET
        yield compare(f"{title}, moved, by processor time", value, "GB/s", reference=reference, at_least=target)

    def _take_turns(self, works: Sequence[Callable[[], None]]) -> list[Cost]:
        """The least time of each, in turns whose order alternates."""
        costs: list[list[Cost]] = [[] for _ in works]
        for repeat in range(self._args.repeats):
            for place in range(len(works))[:: -1 if repeat % 2 else 1]:
                costs[place].append(_cost(works[place]))
        return [Cost(min(cost.cpu_s for cost in its), min(cost.wall_s for cost in its)) for its in costs]


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    args = _parse_args()
    bench = Bench(args)
    rows = run_sections(SECTIONS, args.only, bench)
    if bench.left_out:
        print(bench.left_out)
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMAT_TO_BYTES, default=["int8"], help="formats of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of a decode step")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="the sections to run")
    parser.add_argument("--without-peers", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--quick", action="store_true", help="miniatures of both models: only a check that all runs")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64, help="of each request beside llama.cpp")
    parser.add_argument("--requests", type=int, default=4, help="of the scheduler")
    parser.add_argument("--answer-tokens", type=int, default=264, help="of each: states are saved every 256")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each model")
    parser.add_argument("--num-threads", type=int, help="by default one for each core")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def _enters(prompts: Sequence[Sequence[int]], num_output_tokens: int) -> Iterator[EnteringSequence]:
    """Yield prompts as entering sequences, each with all the blocks it will need."""
    num_tokens = len(prompts[0]) + num_output_tokens
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    for slot, prompt in enumerate(prompts):
        yield make_enter(slot, prompt, range(slot * num_blocks, (slot + 1) * num_blocks), max_num_tokens=num_tokens)


def _cost(work: Callable[[], None]) -> Cost:
    cpu_before, wall_before = time.process_time(), time.perf_counter()
    work()
    return Cost(time.process_time() - cpu_before, time.perf_counter() - wall_before)


def _token_rows(title: str, num_tokens: int, ours: Cost, other: Cost, *, at_least: float | None) -> Iterator[Row]:
    yield compare(
        f"{title}, by processor time",
        num_tokens / ours.cpu_s,
        "tokens/s",
        reference=num_tokens / other.cpu_s,
        at_least=at_least,
    )
    yield compare(f"{title}, by the clock", num_tokens / ours.wall_s, "tokens/s", reference=num_tokens / other.wall_s)


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": Bench.measure_decode,
    "prefill": Bench.measure_prefill,
    "checkpoints": Bench.measure_checkpoints,
    "peer": Bench.measure_peer,
}

if __name__ == "__main__":
    main()
