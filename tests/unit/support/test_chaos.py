"""The chaos tests notice any answer that lost, repeated or changed something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cells.chaos import ChoiceFacts, Damage, Facts, dp_rank_of, mixed_requests

EXPECTED = ChoiceFacts(
    token_ids=(5, 6, 7, 7),
    text="text",
    reason="MAX_TOKENS",
    stop=(0, ""),
    num_tokens=(3, 4),
    logprobs=(),
    prompt_logprobs=(),
)


def damage_by(facts: Facts) -> Damage:
    damage = Damage()
    damage.judge(1, facts, {(0, 0): EXPECTED})
    return damage


def test_an_equal_answer_is_not_damage() -> None:
    assert damage_by({(0, 0): replace(EXPECTED)}) == Damage()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"token_ids": (5, 7, 7)}, "missing"),
        ({"token_ids": (5, 6, 6, 7, 7)}, "repeated"),
        ({"token_ids": (5, 6, 8, 7)}, "changed"),
        ({"text": "tex"}, "changed"),
        ({"reason": "EOS"}, "changed"),
        ({"num_tokens": (3, 5)}, "changed"),
        ({"logprobs": (b"x",)}, "changed"),
    ],
)
def test_a_different_answer_is_reported_by_kind(change: dict[str, object], kind: str) -> None:
    damage = damage_by({(0, 0): replace(EXPECTED, **change)})  # type: ignore[arg-type]

    assert [name for name in ("lost", "missing", "repeated", "changed") if getattr(damage, name)] == [kind]


def test_a_missing_or_extra_choice_is_damage() -> None:
    assert damage_by({}).changed
    assert damage_by({(0, 0): EXPECTED, (0, 1): EXPECTED}).changed


def test_a_load_always_has_the_same_requests_of_every_kind() -> None:
    requests = mixed_requests(16)

    assert requests == mixed_requests(16)
    assert {request.sampling.n for request in requests} == {0, 3}
    assert any(request.stop for request in requests)
    assert any(request.HasField("structured_output") for request in requests)


def test_a_workers_rank_is_read_from_its_name() -> None:
    assert [dp_rank_of(name) for name in ("worker", "worker 0.1", "worker 3.0")] == [0, 0, 3]
