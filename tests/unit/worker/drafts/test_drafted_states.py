"""States take in nothing of a pass with drafts but what is replayed, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.drafts import drafted_states
from services.worker.drafts.drafted_states import DraftedRows, DraftedStates
from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.state_cache import StateCache, StateSpec, StateTensor
from services.worker.ops import DeltaGates, load_ops
from tests.support.kernels.attention_batches import random
from tests.support.models.paged_model import attention_metadata

# Three decodes with 2, no and 3 drafts, and a chunk of a prompt.
SLOTS, LENGTHS, NUM_DECODES = (4, 0, 2, 1), (3, 1, 4, 5), 3
NUM_KEY_HEADS, NUM_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 8, 16
WIDTH = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
F32 = torch.float32
SPEC = StateSpec(
    ((), (StateTensor((3, WIDTH), F32), StateTensor((NUM_HEADS, KEY_DIM, VALUE_DIM), F32))),
    ((), (StateTensor((WIDTH,), F32), StateTensor((2 * NUM_HEADS,), F32))),
)
LAYER = 1
WEIGHT = random(4, WIDTH, seed=1)
PARAMS = DeltaGates(-random(NUM_HEADS, seed=3).exp(), random(NUM_HEADS, seed=4))
INPUTS = random(sum(LENGTHS), WIDTH + 3, seed=5)[:, 3:], random(sum(LENGTHS), 2 * NUM_HEADS, seed=6)


def metadata_of(slots: tuple[int, ...], lengths: tuple[int, ...], *, is_prefill: bool) -> AttentionMetadata:
    tables, state_slots = [[0]] * len(lengths), torch.tensor(slots)
    return attention_metadata(tables, lengths, lengths, block_size=64, is_prefill=is_prefill, state_slots=state_slots)


def make_states() -> StateCache:
    states = StateCache(SPEC, 6)
    for number, tensor in enumerate(states.layers[LAYER]):
        tensor.copy_(random(*tensor.shape, seed=7 + number))
    return states


def rows_of(states: StateCache, *slots: int) -> list[Tensor]:
    return [tensor[list(slots)].clone() for tensor in states.layers[LAYER]]


@pytest.mark.parametrize("backend", ["reference", "native", "cpu", "triton", "triton-exact"])
@pytest.mark.parametrize("counts", [(1, 1, 2), (3, 1, 4), (2, 1, 1)])
@pytest.mark.parametrize("knows_counts", [True, False])
def test_a_state_takes_in_exactly_the_tokens_that_are_replayed(
    backend: str, counts: tuple[int, int, int], knows_counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = load_ops(backend)
    if not knows_counts:
        if backend in ("reference", "cpu"):
            pytest.skip("its loops are the host's")
        # A device's kernels read from its memory where a sequence begins and ends.
        monkeypatch.setattr(drafted_states, "is_on_host", lambda _: False)

    def take_in(inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], metadata: AttentionMetadata) -> Tensor:
        mixed = ops.causal_conv(inputs[0], WEIGHT, states[0], metadata)
        return ops.gated_delta_rule(mixed, inputs[1], PARAMS, states[1], metadata)

    states, before = make_states(), rows_of(make_states(), *range(7))
    drafted = DraftedStates(states, num_rows=NUM_DECODES, num_tokens=sum(LENGTHS[:NUM_DECODES]))
    rows = DraftedRows.split(metadata_of(SLOTS, LENGTHS, is_prefill=True), NUM_DECODES)
    read = drafted.of_pass(rows).take_in(LAYER, INPUTS, take_in)
    # All tokens read what they would without drafts being drafts.
    plain, starts = make_states(), np.cumsum((0, *LENGTHS)).tolist()
    for slot, start, end in zip(SLOTS, starts, starts[1:], strict=False):
        part = tuple(each[start:end] for each in INPUTS)
        metadata = metadata_of((slot,), (end - start,), is_prefill=slot == SLOTS[-1])
        torch.testing.assert_close(read[start:end], take_in(part, plain.layers[LAYER], metadata), atol=1e-5, rtol=1e-4)
    others = [slot for slot in range(7) if slot != SLOTS[-1]]
    assert all(map(torch.equal, rows_of(states, *others), [each[others] for each in before]))
    torch.testing.assert_close(rows_of(states, SLOTS[-1]), rows_of(plain, SLOTS[-1]), atol=1e-5, rtol=1e-4)
    # In two parts, as where a state is saved between them, or at once.
    decodes, firsts, accepted = map(torch.tensor, (SLOTS[:NUM_DECODES], starts[:NUM_DECODES], counts))
    most, at_first = sum(LENGTHS[:NUM_DECODES]), accepted.clamp(max=2)
    drafted.replay(decodes, firsts=firsts, counts=at_first, most=most)
    drafted.replay(decodes, firsts=firsts + at_first, counts=accepted - at_first, most=most)
    expected = make_states()
    for slot, start, count in zip(SLOTS[:NUM_DECODES], starts, counts, strict=False):
        for token in range(start, start + count):
            part = tuple(each[token : token + 1] for each in INPUTS)
            take_in(part, expected.layers[LAYER], metadata_of((slot,), (1,), is_prefill=False))
    ours, theirs = rows_of(states, *others), rows_of(expected, *others)
    if ops.is_exact:
        assert all(map(torch.equal, ours, theirs))
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
