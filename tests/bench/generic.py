"""Models that run transformers' own code on a CPU, in int8: beside our own code, and beside their products alone.

    python -m tests.bench.generic --json generic.json
    python -m tests.bench.generic --quick

Both sides run in this process, on the worker's model runner alone, with random weights, and take turns, so that they
meet the same machine. A figure is the least of all turns, by processor time of all threads, since other work on the
machine only adds to it.

    ours      Llama's class: a decode step and a prompt with transformers' code, relative to ours, which replays steps
    products  Phi-3's and Granite's: a decode step, relative to its products alone
    memory    the most that a load takes, relative to the model and its largest tensor
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from services.worker.config import WorkerSettings
from services.worker.models.generic.products import Product
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from shared.model_files.implementations import WantedImplementation
from shared.model_files.model_dir import WEIGHTS
from tests.bench.parts.report import Row, compare, report, run_sections
from tests.bench.parts.tokens import PromptSource
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.processes import module_command, module_environment
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step

# The most time of transformers' code relative to ours, and of a step relative to its products.
DECODE_TARGET = 1.25
PREFILL_TARGET = 1.15
PRODUCTS_TARGET = 1.5
# Samples of the memory are some ms apart, and libraries keep a little.
MEMORY_TARGET = 1.05

ROWS = (8, 32)
PREFILL_TOKENS = 512
STEPS_PER_TURN = 8
BLOCK_SIZE = 16
PROMPT_TOKENS = 8

_CODES: tuple[WantedImplementation, ...] = ("transformers", "lockstep")
# About 1 B weights.
_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_QUICK = {**_SIZES, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}


class Model:
    """A runner of random weights in int8, with our code or transformers'."""

    def __init__(self, config: dict[str, Any], code: WantedImplementation, num_threads: int | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            settings = WorkerSettings(
                model_dir=Path(folder),
                load_format="dummy",
                kv_cache_memory_gib=1.0,
                num_threads=num_threads,
                model_impl=code,
                quantization="int8",
            )
            self.runner: ModelRunner = build_model_runner(settings, lambda _: None)

    def begin(self, num_rows: int, num_prompt_tokens: int, num_steps: int) -> None:
        """Begin an epoch with so many prompts, not yet computed."""
        num_tokens = num_prompt_tokens + num_steps + 1
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        prompts = PromptSource(num_prompt_tokens).take(num_rows)
        self.runner.attach(
            block_size=BLOCK_SIZE, max_num_seqs=num_rows, max_num_batched_tokens=num_rows * num_prompt_tokens
        )
        self._entering = [
            make_enter(slot, prompt, range(slot * num_blocks, (slot + 1) * num_blocks), max_num_tokens=num_tokens)
            for slot, prompt in enumerate(prompts)
        ]

    def prefill(self, *, leave: Sequence[int] = ()) -> None:
        """Compute all prompts in a step, after the sequences of the slots in `leave` have left."""
        self.runner.run_step(prefill_step(*self._entering, leave=leave))

    def decode(self) -> None:
        """Compute the next tokens of all sequences, for a turn."""
        for _ in range(STEPS_PER_TURN):
            self.runner.run_step(decode_step())


class Bench:
    """The measurements of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._sizes = _QUICK if args.quick else _SIZES

    def measure_ours(self) -> Iterator[Row]:
        """Llama's class with both codes."""
        config = self._config("LlamaForCausalLM")
        models = [Model(config, code, self._args.threads) for code in _CODES]
        for num_rows in ROWS:
            for model in models:
                self._begin_decode(model, num_rows)
            theirs, ours = self._take_turns([model.decode for model in models])
            yield compare(
                f"decode step of {num_rows}, transformers' code",
                theirs / STEPS_PER_TURN * 1e3,
                "CPU ms",
                reference=ours / STEPS_PER_TURN * 1e3,
                at_most=DECODE_TARGET,
            )
        for model in models:
            model.begin(1, PREFILL_TOKENS, 1)
            model.prefill()
        theirs, ours = self._take_turns([partial(model.prefill, leave=[0]) for model in models])
        title = f"prompt of {PREFILL_TOKENS}, transformers' code"
        yield compare(title, theirs * 1e3, "CPU ms", reference=ours * 1e3, at_most=PREFILL_TARGET)

    def measure_products(self) -> Iterator[Row]:
        """Decode steps beside all their products."""
        for architecture in ("Phi3ForCausalLM", "GraniteForCausalLM"):
            config = self._config(architecture)
            model = Model(config, "transformers", self._args.threads)
            multiply_all = self._products(config)
            for num_rows in ROWS:
                self._begin_decode(model, num_rows)
                step, products = self._take_turns([model.decode, partial(multiply_all, num_rows)])
                yield compare(
                    f"{architecture}, decode step of {num_rows}",
                    step / STEPS_PER_TURN * 1e3,
                    "CPU ms",
                    reference=products / STEPS_PER_TURN * 1e3,
                    at_most=PRODUCTS_TARGET,
                )

    def measure_memory(self) -> Iterator[Row]:
        """The most memory of a load, in a process of its own, of a checkpoint in bfloat16."""
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            config = self._config("Phi3ForCausalLM")
            model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**config)).bfloat16()
            model.save_pretrained(directory, max_shard_size="100GB")
            write_tiny_tokenizer(directory)
            with safe_open(directory / WEIGHTS, framework="pt") as file:
                largest = max(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
            del model
            command = module_command(
                "tests.support.models.load_memory", str(directory), "native", "int8", "--dtype", "bfloat16"
            )
            printed = subprocess.run(
                command, env=module_environment(), capture_output=True, text=True, check=True
            ).stdout.splitlines()[-1]
        memory = json.loads(printed)
        yield compare(
            "most memory of a load",
            memory["peak"] / 2**20,
            "MiB",
            reference=(memory["kept"] + largest) / 2**20,
            at_most=MEMORY_TARGET,
        )

    def _config(self, architecture: str) -> dict[str, Any]:
        model_class: Any = getattr(transformers, architecture)
        values: dict[str, Any] = model_class.config_class(**self._sizes).to_dict()
        return {**values, "architectures": [architecture]}

    def _begin_decode(self, model: Model, num_rows: int) -> None:
        model.begin(num_rows, PROMPT_TOKENS, STEPS_PER_TURN * (self._args.repeats + 1))
        model.prefill()
        model.decode()

    def _products(self, config: dict[str, Any]) -> Callable[[int], None]:
        """What multiplies rows with every matrix of such a model, as often as a turn does."""
        ops = load_ops("native")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            options = LoadOptions(dummy_seed=0, quantization=MatrixFormat.INT8)
            loaded: Any = load_model(Path(folder), ops, ops.automatic_dtype, lambda _: None, options=options)
        roots = loaded.model._base, loaded.model._causal
        products = [each for root in roots for each in root.modules() if isinstance(each, Product)]

        def multiply_all(num_rows: int) -> None:
            widths = {each.in_features for each in products}
            inputs = {width: torch.ones(num_rows, width, dtype=loaded.model.dtype) for width in widths}
            for _ in range(STEPS_PER_TURN):
                for each in products:
                    each(inputs[each.in_features])

        return multiply_all

    def _take_turns(self, works: Sequence[Callable[[], None]]) -> list[float]:
        """The least processor seconds of each, in turns whose order alternates."""
        costs: list[list[float]] = [[] for _ in works]
        for repeat in range(self._args.repeats):
            for place in range(len(works))[:: -1 if repeat % 2 else 1]:
                started = time.process_time()
                works[place]()
                costs[place].append(time.process_time() - started)
        return [min(each) for each in costs]


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--threads", type=int, default=None, help="default: those of a worker")
    parser.add_argument("--repeats", type=int, default=None, help="turns of each side; default 12, quick 3")
    parser.add_argument("--quick", action="store_true", help="small models, whose ratios say little")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.repeats = args.repeats or (3 if args.quick else 12)
    report(run_sections(SECTIONS, args.only, Bench(args)), args.json)


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "ours": Bench.measure_ours,
    "products": Bench.measure_products,
    "memory": Bench.measure_memory,
}

if __name__ == "__main__":
    main()
