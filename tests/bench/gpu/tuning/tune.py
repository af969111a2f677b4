"""Which of a few configurations of a kernel is the fastest, for the launches that matter most.

A case is a kernel at one size. Its variants are measured beside what the kernel chooses by itself, the default, and
beside the floor of the same work. A second round changes the best of the first further. At the end the default and the
best are measured once more, one after the other: that row has what the function that chooses may say.

Weights and contexts are read from memory: launches take copies of them in turn, more than the last cache holds.
Activations may come from it, as in a step. The floor of products in FP8 has the rate of those in bfloat16.

The most important cases come first: attention of decode steps, with the bound of contexts that a graph has; prefill
attention; products and experts; norms and sampling. They are 72 cases with 1200 variants, which need 430 kernels.
Processes compile these ahead, 1 to 2 seconds each: 14 of them take about 40 seconds, most of it while the first cases
are measured. A variant is measured in 0.1 to 0.2 seconds, so all should take 200 to 300 seconds. That is an estimate:
none has run on a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from tests.bench.gpu.cases import Case
from tests.bench.gpu.kernels.ops import launch_s
from tests.bench.gpu.runners import Bench
from tests.bench.gpu.tuning.attention import attention_subjects
from tests.bench.gpu.tuning.compile import Compilers
from tests.bench.gpu.tuning.products import dense_subjects, expert_subjects, product_subjects
from tests.bench.gpu.tuning.rows import row_subjects
from tests.bench.gpu.tuning.subjects import Launches, Place, Subject, Variant, in_words
from tests.bench.parts.report import Row, compare

_SETUP_S, _VARIANT_S = 1.5, 0.2
# Results that differ by more, as a part of the largest, are wrong.
_TOLERANCE = 0.02
_LONGEST_MESSAGE = 100


def cases(bench: Bench) -> Iterator[Case]:
    """A case for each kernel and size."""
    is_tiny = bench.options.is_tiny
    kinds = (attention_subjects, dense_subjects, product_subjects, expert_subjects, row_subjects)
    subjects = list(chain.from_iterable(kind(is_tiny=is_tiny) for kind in kinds))
    is_gpu = bench.device.type == "cuda"
    compilers = Compilers(subjects, _target() if is_gpu else "")
    place = Place(bench.device, torch.bfloat16 if is_gpu else torch.float32)
    try:
        for subject in subjects:
            seconds = _SETUP_S + _VARIANT_S * subject.num_variants
            yield Case(subject.name, seconds, partial(_subject_rows, bench, place, subject, compilers))
    finally:
        compilers.close()


def _target() -> str:
    """What Triton compiles for."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


@torch.inference_mode()
def _subject_rows(bench: Bench, place: Place, subject: Subject, compilers: Compilers) -> Iterator[Row]:
    compilers.wait(subject.name)
    launches = subject.make(place)
    seconds = partial(_seconds, bench, launches)
    floor_s = bench.rates.floor_s([launches.work])
    yield from tuned_rows(subject, launches, seconds, floor_s)


def tuned_rows(
    subject: Subject, launches: Launches, seconds: Callable[[Variant], float], floor_s: float
) -> Iterator[Row]:
    """A row for the default and each variant, and one for the best of all.

    Args:
        seconds: Measures the launch of a variant.
        floor_s: The shortest time that a launch can take.
    """
    name, default_s = subject.name, seconds({})
    expected = _result(launches, {})

    def row(words: str, launch_s: float, reference_s: float) -> Row:
        what = f"{name}: {words}, {floor_s / launch_s:.0%} of the floor's speed"
        return compare(what, launch_s * 1e6, "us", reference=reference_s * 1e6)

    yield row(f"default {in_words(launches.default)}", default_s, default_s)
    best: Variant = {}
    best_s = default_s
    for variants in subject.rounds:
        start = best
        for change in variants:
            variant = {**start, **change}
            if {**launches.default, **variant} == {**launches.default, **start}:
                continue
            try:
                if _differs(_result(launches, variant), expected):
                    raise ArithmeticError("another result than by default")
                variant_s = seconds(variant)
            except TimeoutError:
                # The whole case has taken too long.
                raise
            except Exception as error:  # noqa: BLE001 - it does not compile, or does not fit: the next ones may
                traceback.print_exception(error)
                message = f"{type(error).__name__}: {error}".replace("\n", " ")[:_LONGEST_MESSAGE]
                yield Row(f"{name}: left out {in_words(change)}, {message}", 1, "variants")
                continue
            yield row(in_words(change), variant_s, default_s)
            if variant_s < best_s:
                best, best_s = variant, variant_s
    default_s, best_s = seconds({}), seconds(best)
    yield row(f"BEST {in_words({**launches.default, **best})}", best_s, default_s)


def _seconds(bench: Bench, launches: Launches, variant: Variant) -> float:
    """The device's time for a launch."""
    turns = count()
    return launch_s(bench, lambda: launches.launch(next(turns), **variant))


def _result(launches: Launches, variant: Variant) -> Tensor | None:
    """A copy, as the next launch may write to the same place."""
    result = launches.launch(0, **variant)
    return None if result is None else result.clone()


def _differs(result: Tensor | None, expected: Tensor | None) -> bool:
    if result is None or expected is None:
        return False
    if not result.is_floating_point():
        return not torch.equal(result, expected)
    difference = (result - expected).abs().max()
    # Not the opposite, of which NaN is not a result.
    return not bool(difference <= _TOLERANCE * expected.abs().max())
