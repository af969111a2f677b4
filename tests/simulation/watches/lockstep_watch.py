"""What the steps of coupled ranks must have in common, so that their collectives match."""

from __future__ import annotations

from services.scheduler.core.batch.step import ScheduledBatch, Step
from shared.step.step import StepKind
from tests.simulation.watches.epoch_watch import EpochWatch


def check_lockstep(ranks: list[EpochWatch], dp_size: int) -> None:
    """Check that all coupled ranks have the same newest step to run, and that its parts fit together.

    Raises:
        AssertionError: A rank would wait for a partner forever, or meet it in a different collective.
    """
    assert len(ranks) == dp_size, "only some of the coupled ranks are attached"
    newest = [rank.in_flight[-1].step for rank in ranks if rank.in_flight]
    assert len(newest) == dp_size, "a deadlock: a coupled rank has no step to run with the others"
    assert len({(step.epoch, step.step_id) for step in newest}) == 1, "a deadlock: coupled ranks run different steps"
    computed = tuple(num_tokens_of(step.batch) or step.batch.num_dummy_tokens for step in newest)
    assert all(step.num_tokens_across_dp == computed for step in newest), "ranks have wrong token counts of the others"
    _check_kinds(newest)


def num_tokens_of(batch: ScheduledBatch) -> int:
    """The number of tokens that a batch computes for sequences; 0 for a dummy."""
    chunks = [*batch.chunks, *(enter.chunk for enter in batch.enters)]
    return len(batch.decode_slots) + sum(chunk.num_tokens for chunk in chunks)


def _check_kinds(steps: list[Step]) -> None:
    """Check that a step with a prompt is eager on all ranks, and that any other is a decode at one padded size."""
    is_control = all(step.batch.is_dummy for step in steps)
    has_prompt = any(step.batch.chunks or step.batch.enters for step in steps)
    if is_control:
        # No rank decides what the others do.
        has_prompt = steps[0].batch.kind is StepKind.PREFILL
    sizes = {step.graph_batch_size for step in steps}
    assert len(sizes) == 1, "some ranks run a graph that the others do not"
    (size,) = sizes
    if has_prompt:
        assert size == 0, "a graph runs while another rank computes a prompt"
    else:
        assert size >= max(steps[0].num_tokens_across_dp), "a graph is too small for a rank"
    dummies = {step.batch.kind for step in steps if step.batch.is_dummy}
    expected = StepKind.PREFILL if has_prompt else StepKind.DECODE
    assert dummies <= {expected}, "a dummy of a different kind than the step"
