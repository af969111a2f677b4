"""The draw of tokens beside numpy's, for every set of instructions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.native.backend import NativeOps
from services.worker.ops.native.isa import available_isas
from tests.support.kernels.draws import Draw, draw_rows


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    return Draw(
        draw(st.sampled_from([0.0, 2**-13, 0.125, 1.0, 1.75, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 7, 200, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 2**-20])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 2**32 - 1)),
        position=draw(st.integers(0, 2**31)),
    )


@given(
    rows=st.lists(draws(), min_size=1, max_size=9),
    num_columns=st.sampled_from([1, 2, 15, 16, 17, 300, 5003]),
    spread=st.sampled_from([0.0, 0.01, 4.0, 300.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_tokens_are_those_that_numpy_draws(rows: list[Draw], num_columns: int, spread: float, seed: int) -> None:
    logits = torch.randn(len(rows), num_columns, generator=torch.Generator().manual_seed(seed)) * spread
    expected = [draw.token(row) for draw, row in zip(rows, logits.numpy(), strict=True)]
    for isa in available_isas():
        token_ids, is_finite = NativeOps(isa).sample(logits, draw_rows(rows))
        assert token_ids.tolist() == expected
        assert is_finite.all()


def test_masked_columns_are_never_drawn(ops: NativeOps, num_threads: int) -> None:
    logits = torch.full((50, 1000), -torch.inf)
    logits[:, 400:403] = torch.tensor([1.0, 2.0, 1.5])
    token_ids, _ = ops.sample(logits, draw_rows([Draw(1.0, seed=1, position=position) for position in range(50)]))
    assert set(token_ids.tolist()) == {400, 401, 402}


def test_rows_of_a_wider_tensor_are_drawn_as_their_copies(ops: NativeOps, num_threads: int) -> None:
    wide = torch.randn(4, 700, generator=torch.Generator().manual_seed(5))
    rows = draw_rows([Draw(1.0, seed=seed, position=9) for seed in range(4)])
    token_ids, _ = ops.sample(wide[:, :500], rows)
    assert token_ids.tolist() == ops.sample(wide[:, :500].contiguous(), rows)[0].tolist()
