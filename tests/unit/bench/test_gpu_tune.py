"""The tune stage finds the fastest variant, and what it tries fits the kernels' arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.ops.triton.attention.context_splits import SplitLimits
from services.worker.ops.triton.attention.decode import DecodeConfig
from services.worker.ops.triton.attention.prefill import PrefillConfig
from services.worker.ops.triton.products.experts import ExpertSizes
from services.worker.ops.triton.products.tile_sizes import TileSizes
from tests.bench.gpu.floors import Work
from tests.bench.gpu.tuning.attention import attention_subjects
from tests.bench.gpu.tuning.products import expert_subjects, product_subjects
from tests.bench.gpu.tuning.rows import row_subjects
from tests.bench.gpu.tuning.subjects import Launches, Subject, Variant, num_copies
from tests.bench.gpu.tuning.tune import tuned_rows
from tests.bench.parts.report import Row
from tests.support.system.processes import ROOT

KINDS = (attention_subjects, product_subjects, expert_subjects, row_subjects)


def subjects(*, is_tiny: bool) -> Iterator[Subject]:
    return chain.from_iterable(kind(is_tiny=is_tiny) for kind in KINDS)


def rows_of(*rounds: tuple[Variant, ...]) -> list[Row]:
    """The rows of a kernel whose time is the product of its arguments, for a floor of 1 s.

    Its size may not be 13, and with 7 its result is another one.
    """

    def launch(_: int, *, size: int = 4, warps: int = 2) -> Tensor:
        if size == 13:
            raise ValueError("no size\n13")
        return torch.tensor([2.0 if size == 7 else 1.0])

    def seconds(variant: Variant) -> float:
        chosen = {"size": 4, "warps": 2, **variant}
        return float(str(chosen["size"])) * float(str(chosen["warps"]))

    launches = Launches(launch, {"size": 4, "warps": 2}, Work(1, 1))
    subject = Subject("k", lambda _: launches, rounds)
    return list(tuned_rows(subject, launches, seconds, 1.0))


def test_the_best_variant_of_a_round_is_changed_in_the_next() -> None:
    rows = rows_of(({"size": 8}, {"size": 3}), ({"warps": 1}, {"warps": 4}))
    assert [(row.metric, row.value, row.ratio) for row in rows] == [
        ("k: default size=4, warps=2, 12% of the floor's speed", 8e6, 1.0),
        ("k: size=8, 6% of the floor's speed", 16e6, 2.0),
        ("k: size=3, 17% of the floor's speed", 6e6, 0.75),
        ("k: warps=1, 33% of the floor's speed", 3e6, 0.375),
        ("k: warps=4, 8% of the floor's speed", 12e6, 1.5),
        ("k: BEST size=3, warps=1, 33% of the floor's speed", 3e6, 0.375),
    ]


def test_the_default_is_not_tried_again_and_may_be_the_best() -> None:
    assert [row.metric for row in rows_of(({"size": 4}, {"size": 5}), ({"warps": 2},))] == [
        "k: default size=4, warps=2, 12% of the floor's speed",
        "k: size=5, 10% of the floor's speed",
        "k: BEST size=4, warps=2, 12% of the floor's speed",
    ]


def test_what_fails_or_computes_something_else_has_a_row_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(({"size": 13}, {"size": 7}, {"size": 1}, {"size": 2}))
    assert [row.metric for row in rows[1:]] == [
        "k: left out size=13, ValueError: no size 13",
        "k: left out size=7, ArithmeticError: another result than by default",
        "k: size=1, 50% of the floor's speed",
        "k: size=2, 25% of the floor's speed",
        "k: BEST size=1, warps=2, 50% of the floor's speed",
    ]
    assert "ValueError" in capsys.readouterr().err


def test_copies_are_more_than_the_last_cache_holds() -> None:
    assert num_copies(2**20) == 20
    assert num_copies(2**26) == 4
    assert num_copies(2**30) == 1


def test_names_are_unique_and_the_sizes_of_variants_are_powers_of_two() -> None:
    for is_tiny in (False, True):
        found = list(subjects(is_tiny=is_tiny))
        assert len({subject.name for subject in found}) == len(found)
    for subject in subjects(is_tiny=False):
        for variant in chain.from_iterable(subject.rounds):
            for value in variant.values():
                assert all(size & (size - 1) == 0 for size in sizes_of(value)), (subject.name, value)


def sizes_of(value: object) -> list[int]:
    """What must be a power of two."""
    if isinstance(value, ExpertSizes):
        assert value.gate_up.rows == value.down.rows
        return [*sizes_of(value.gate_up), *sizes_of(value.down)]
    if isinstance(value, TileSizes):
        return [value.rows, value.columns, value.depth, value.num_warps]
    if isinstance(value, DecodeConfig):
        return [value.tokens, value.num_warps]
    if isinstance(value, PrefillConfig):
        return [value.rows, value.tokens, value.num_warps]
    if isinstance(value, SplitLimits):
        return [value.max_splits]
    assert isinstance(value, int)
    return [value]


@pytest.mark.slow
@pytest.mark.process
def test_processes_compile_the_variants_into_the_cache(tmp_path: Path) -> None:
    script = tmp_path / "compile_one.py"
    script.write_text(
        "from tests.bench.gpu.tuning.attention import attention_subjects\n"
        "from tests.bench.gpu.tuning.compile import Compilers\n"
        "if __name__ == '__main__':\n"
        "    subject = next(attention_subjects(is_tiny=True))\n"
        "    compilers = Compilers([subject], 'sm_90', num_processes=1)\n"
        "    compilers.wait(subject.name)\n"
        "    compilers.close()\n",
        encoding="utf-8",
    )
    cache = tmp_path / "cache"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}
    subprocess.run([sys.executable, str(script)], cwd=ROOT, env=environment, check=True)
    # The default and a variant; other split limits need no other kernel.
    assert len(list(cache.rglob("_decode_attention_kernel.cubin"))) == 2
