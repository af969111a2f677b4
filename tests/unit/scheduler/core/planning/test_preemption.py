"""Which running sequence is preempted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.planning.preemption import pick_victim
from services.scheduler.core.policy import RetractionPolicy
from shared.step.columns import Int32Column


def order_of(*slots: int) -> Slots:
    return np.array(slots, np.intp)


def column(*values: int) -> Int32Column:
    return np.array(values, np.int32)


def test_the_last_to_enter_is_preempted_whatever_it_has_generated() -> None:
    assert pick_victim(RetractionPolicy.LAST_IN, order_of(2, 0, 1), column(5, 90, 7)) == 2


def test_the_sequence_with_the_least_output_is_preempted() -> None:
    # By slot: slot 0, which entered second, has generated 3 tokens; slot 3 is free.
    order, num_completion_tokens = order_of(2, 0, 1), column(3, 9, 5, 0)
    assert pick_victim(RetractionPolicy.FEWEST_OUTPUT_TOKENS, order, num_completion_tokens) == 1


def test_among_equals_the_last_to_enter_is_preempted() -> None:
    assert pick_victim(RetractionPolicy.FEWEST_OUTPUT_TOKENS, order_of(3, 1, 2, 0), column(4, 2, 2, 4)) == 2


@given(st.permutations(range(8)), st.integers(1, 8), st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_victims_are_ordered_by_the_least_output(
    slots: list[int], num_running: int, num_completion_tokens: list[int]
) -> None:
    order = order_of(*slots[:num_running])
    entered = {slot: position for position, slot in enumerate(order.tolist())}
    victims = []
    while order.size:
        index = pick_victim(RetractionPolicy.FEWEST_OUTPUT_TOKENS, order, column(*num_completion_tokens))
        victims.append(int(order[index]))
        order = np.delete(order, index)
    assert victims == sorted(entered, key=lambda slot: (num_completion_tokens[slot], -entered[slot]))
