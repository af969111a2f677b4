"""Model runners with random weights, driven in process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from services.worker.config import WorkerSettings
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from services.worker.runner.steps.pending_step import PendingStep
from shared.step.step import EnteringSequence
from tests.bench.gpu.cases import Clock
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.floors import Rates
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, prefill_step, with_params

BLOCK_SIZE = 16
_GIB = 2**30
_WARM_UP_PRODUCTS = 500


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    context: int = 1024
    """Tokens before the measured decode steps."""
    long_context: int = 32768
    latent_context: int = 4096
    num_steps: int = 32
    prefill: tuple[int, int] = (8, 2048)
    """Prompts, and the tokens of each."""
    num_requests: int = 1024
    lengths: tuple[int, int] = (100, 1024)
    """The fewest and the most tokens of a served prompt, and of an answer."""
    num_clients: int = 4
    num_repeats: int = 20
    """Of one kernel."""


FULL = Effort()
TINY = Effort(
    batch_sizes=(1, 3),
    context=20,
    long_context=100,
    latent_context=40,
    num_steps=2,
    prefill=(2, 40),
    num_requests=6,
    lengths=(4, 12),
    num_clients=2,
    num_repeats=2,
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    shapes: tuple[str, ...] = ()
    """Only these; empty means all published ones, and `tiny` the miniatures."""
    device: str = "auto"
    kv_cache_gib: float | None = None
    enforce_eager: bool = False
    model_dir: Path | None = None
    """The real model."""

    @property
    def is_tiny(self) -> bool:
        """Whether miniatures are measured."""
        return "tiny" in self.shapes

    @property
    def effort(self) -> Effort:
        """How much is measured."""
        return TINY if self.is_tiny else FULL

    def selected(self, published: Sequence[str], tiny: Sequence[str]) -> list[str]:
        """The shapes of a stage that are asked for."""
        if self.is_tiny:
            return list(tiny)
        return [shape for shape in published if not self.shapes or shape in self.shapes]


@dataclass(frozen=True, slots=True)
class Bench:
    """What stages share."""

    options: Options
    folder: Path
    """Empty at first, and gone afterwards."""
    device: torch.device
    clock: Clock
    rates: Rates

    @property
    def item_bytes(self) -> int:
        """Bytes of a value in the dtype that `auto` is on the device."""
        return 2 if self.device.type == "cuda" else 4

    def model_dir(self, shape: str) -> Path:
        """A directory with the configuration of a shape."""
        model_dir = self.folder / shape
        if not model_dir.exists():
            model_dir.mkdir()
            (model_dir / "config.json").write_text(json.dumps(CONFIGS[shape]), encoding="utf-8")
        return model_dir

    def make_runner(self, shape: str, backend: str = "auto") -> ModelRunner:
        """A runner with random weights on the device."""
        values = {
            "model_dir": self.model_dir(shape),
            "load_format": "dummy",
            "device": self.options.device,
            "ops_backend": backend,
            "enforce_eager": self.options.enforce_eager,
            "kv_cache_memory_gib": self.options.kv_cache_gib,
            "quantization": "none",
        }
        return build_model_runner(WorkerSettings.model_validate(values), lambda _: None)


def measure_rates(clock: Clock, device: torch.device) -> Rates:
    """Copy a large tensor, and multiply two square matrices."""
    is_gpu = device.type == "cuda"
    source = torch.ones(_GIB if is_gpu else _GIB // 64, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size, dtype = (8192, torch.bfloat16) if is_gpu else (512, torch.float32)
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    # A GPU raises its clocks only once it has work: too low a rate would be too high a floor.
    clock.mean_s(lambda: a @ b, _WARM_UP_PRODUCTS if is_gpu else 1)
    copy_s, product_s = clock.median_s(lambda: target.copy_(source), 10), clock.median_s(lambda: a @ b, 10)
    return Rates(2 * len(source) / copy_s, 2 * size**3 / product_s)


def free_memory() -> None:
    """Give unused memory back to the device, where the next runner, or another process, measures what is left."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass
class Held:
    """A runner that cases of a shape share, from the one that loads it on; empty if that one did not."""

    name: str
    limits: dict[str, int]
    """As for `ModelRunner.attach`."""
    runner: ModelRunner | None = None

    @property
    def loaded(self) -> ModelRunner:
        """The runner."""
        assert self.runner is not None, "a case without a runner"
        return self.runner

    def free(self) -> None:
        """Drop the runner."""
        self.runner = None
        free_memory()

    def attach(self) -> None:
        """Begin with an empty batch."""
        assert self.loaded.attach(**self.limits), "no memory for the KV cache"

    def fill(self, num_seqs: int, context: int, *, num_later: int, sampling: Sampling) -> None:
        """Begin with sequences that have `context` tokens, and blocks for `num_later` more."""
        self.attach()
        waiting = enters(context, context + num_later, sampling, most_new=self.limits["max_num_batched_tokens"])
        at_once = max(1, self.limits["max_num_batched_tokens"] // context)
        batch = list(islice(waiting, num_seqs))
        for first in range(0, num_seqs, at_once):
            entering = batch[first : first + at_once]
            self.loaded.run_step(prefill_step(*entering))
            self._finish_prompts(entering, context)

    def _finish_prompts(self, entering: Sequence[EnteringSequence], context: int) -> None:
        """Compute the rest of a prompt that is longer than a step."""
        most = self.limits["max_num_batched_tokens"]
        for first in range(most, context, most):
            last = min(first + most, context)
            chunks = [
                make_chunk(enter.chunk.slot, prompt_tokens(enter.chunk.slot, range(first, last)), context - last)
                for enter in entering
            ]
            self.loaded.run_step(prefill_step(chunks=chunks))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = Sampling()


def enters(
    length: int, num_tokens: int, sampling: Sampling = GREEDY, *, most_new: int = 1 << 20
) -> Iterator[EnteringSequence]:
    """Sequences of `length` prompt tokens, each with blocks of its own for `num_tokens`.

    Of a longer prompt the first `most_new` tokens enter.
    """
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    num_new = min(length, most_new)
    slot = 0
    while True:
        blocks = range(slot * num_blocks, (slot + 1) * num_blocks)
        prompt = prompt_tokens(slot, range(num_new))
        enter = make_enter(
            slot,
            prompt,
            blocks,
            num_later_tokens=length - num_new,
            max_num_tokens=num_tokens,
            temperature=sampling.temperature,
            seed=slot,
        )
        yield with_params(enter, top_p=sampling.top_p, top_k=sampling.top_k)
        slot += 1


def prompt_tokens(slot: int, places: range) -> list[int]:
    """A prompt's tokens at these places."""
    return [(7 * slot + 13 * place) % 251 for place in places]


def decode_ahead(runner: ModelRunner, num_steps: int) -> None:
    """Run decode steps, each launched before the one before it has returned. A launch that waits for a GPU fails."""
    pending: PendingStep | None = None
    for _ in range(num_steps):
        with without_waiting(runner.device):
            launched = runner.launch(decode_step())
        if pending is not None:
            pending.finish()
        pending = launched
    if pending is not None:
        pending.finish()


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Let whatever waits for a GPU in the body raise."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
