"""Decode steps of models with experts, latents or packed weights, and of the exact backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tests.bench.gpu.cases import Case
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.decode import decode_rows, dense_limits, load_rows, timed_decode
from tests.bench.gpu.floors import expected_touched, num_experts
from tests.bench.gpu.runners import GREEDY, Bench, Held
from tests.bench.gpu.watch import watched_choices
from tests.bench.parts.report import Row, compare

FLOOR_TARGET = 0.55
_LOAD_S, _CASE_S = 60.0, 8.0


@dataclass(frozen=True, slots=True)
class Sparse:
    """A model with experts, measured beside its floor."""

    shape: str
    batch_sizes: tuple[int, ...]
    is_long: bool = False
    """Whether sequences have the long context of latents."""
    load_s: float = _LOAD_S


@dataclass(frozen=True, slots=True)
class Faster:
    """The same model in another format or on another backend, measured beside the plain one."""

    shape: str
    backend: str
    batch_size: int
    at_least: float | None
    """The least speed, as a multiple of the plain one's."""


PLAIN, TINY_PLAIN = "qwen3-8b", "tiny"
FASTER = (
    Faster("qwen3-8b-fp8", "auto", 1, 1.5),
    Faster("qwen3-8b-int4", "auto", 1, 2.0),
    Faster("qwen3-8b", "triton-exact", 32, 0.4),
)
TINY_FASTER = (
    Faster("tiny-fp8", "auto", 1, None),
    Faster("tiny-int4", "auto", 1, None),
    Faster("tiny", "reference", 3, None),
)
SPARSE = (
    Sparse("qwen3-30b-a3b", (1, 8, 32), load_s=120.0),
    Sparse("deepseek-v3-4l", (1, 64), is_long=True, load_s=90.0),
    Sparse("gpt-oss-20b", (1,), load_s=90.0),
)
TINY_SPARSE = (
    Sparse("tiny-experts", (1, 3)),
    Sparse("tiny-latent", (1,), is_long=True),
    Sparse("tiny-mxfp4", (1,)),
)


def cases(bench: Bench) -> Iterator[Case]:
    """Packed weights beside plain ones, and each sparse model beside its floor."""
    is_tiny = bench.options.is_tiny
    plain, others = (TINY_PLAIN, TINY_FASTER) if is_tiny else (PLAIN, FASTER)
    shapes = bench.options.selected([other.shape for other in FASTER], [other.shape for other in TINY_FASTER])
    wanted = [other for other in others if other.shape in shapes]
    if wanted:
        yield from _faster_cases(bench, plain, wanted)
    known = {sparse.shape: sparse for sparse in (*SPARSE, *TINY_SPARSE)}
    names = [sparse.shape for sparse in SPARSE], [sparse.shape for sparse in TINY_SPARSE]
    for shape in bench.options.selected(*names):
        yield from _sparse_cases(bench, known[shape])


def _faster_cases(bench: Bench, plain: str, others: list[Faster]) -> Iterator[Case]:
    """The plain model first: what the others are compared with."""
    batch_size_to_s: dict[int, float] = {}
    held = Held(f"{plain}, plain", dense_limits(bench))
    yield Case(f"{plain}, plain: load", _LOAD_S, partial(load_rows, bench, held, plain))
    if held.runner is None:
        return
    sizes = sorted({other.batch_size for other in others})
    yield Case(f"{plain}, plain", len(sizes) * _CASE_S, partial(_plain_rows, bench, held, sizes, batch_size_to_s))
    held.free()
    for other in others:
        name = other.shape if other.backend == "auto" else f"{other.shape}, {other.backend}"
        held = Held(name, dense_limits(bench))
        yield Case(f"{name}: load", _LOAD_S, partial(load_rows, bench, held, other.shape, other.backend))
        if held.runner is not None and other.batch_size in batch_size_to_s:
            measure = partial(_faster_rows, bench, held, other, batch_size_to_s[other.batch_size])
            yield Case(name, _CASE_S, measure)
        held.free()


def _plain_rows(bench: Bench, held: Held, sizes: list[int], batch_size_to_s: dict[int, float]) -> Iterator[Row]:
    context = bench.options.effort.context
    for size in sizes:
        batch_size_to_s[size], _ = timed_decode(bench, held, num_seqs=size, context=context)
        yield Row(f"{held.name}: decode step of {size} after {context}", batch_size_to_s[size] * 1e3, "ms")


def _faster_rows(bench: Bench, held: Held, other: Faster, plain_s: float) -> Iterator[Row]:
    context = bench.options.effort.context
    step_s, _ = timed_decode(bench, held, num_seqs=other.batch_size, context=context)
    name = f"{held.name}: decode steps of {other.batch_size} after {context}, beside plain"
    yield compare(name, 1 / step_s, "steps/s", reference=1 / plain_s, at_least=other.at_least)
    yield from decode_rows(bench, held, other.shape, num_seqs=other.batch_size, target=None)


def _sparse_cases(bench: Bench, sparse: Sparse) -> Iterator[Case]:
    shape = sparse.shape
    limits = {**dense_limits(bench), "max_num_seqs": max(sparse.batch_sizes)}
    held = Held(shape, limits)
    yield Case(f"{shape}: load", sparse.load_s, partial(load_rows, bench, held, shape))
    if held.runner is None:
        return
    for batch_size in sparse.batch_sizes:
        measure = partial(_sparse_rows, bench, held, sparse, batch_size)
        yield Case(f"{shape}: decode of {batch_size}", 2 * _CASE_S, measure)
    held.free()


def _sparse_rows(bench: Bench, held: Held, sparse: Sparse, num_seqs: int) -> Iterator[Row]:
    """The experts that the prompts' last tokens choose stand for those that the decoded tokens choose."""
    effort, config = bench.options.effort, CONFIGS[sparse.shape]
    context = effort.latent_context if sparse.is_long else effort.context
    with watched_choices() as choices:
        held.fill(num_seqs, context, num_later=1, sampling=GREEDY)
    num_layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    touched = choices.num_touched(num_layers, every=context)
    expected = expected_touched(num_experts(config), config["num_experts_per_tok"], num_seqs)
    name = f"{sparse.shape}: experts of a layer that {num_seqs} tokens touch, beside chance"
    yield compare(name, touched, "experts", reference=expected)
    target = None if bench.options.is_tiny else FLOOR_TARGET
    yield from decode_rows(
        bench, held, sparse.shape, num_seqs=num_seqs, target=target, context=context, num_touched=touched
    )
