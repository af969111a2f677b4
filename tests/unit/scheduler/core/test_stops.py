"""Why a sequence stops after its newest token, and which tokens must be checked for it."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.batch.sequence import Finish, FinishReason, Sequence
from services.scheduler.core.stops import find_finish, watched_tokens
from shared.ids import RequestHandle
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import SamplingOptions, SamplingParams

EOS = frozenset({7})
PROMPT = [1, 7, 5]


def finish_after(completion: list[int], **params: object) -> Finish | None:
    """Why a sequence with this completion stops; None if it does not."""
    sampling = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
    tokens = bytearray(np.array(PROMPT + completion, TOKEN_DTYPE).tobytes())
    return find_finish(Sequence("r", 1, RequestHandle(1), sampling, tokens, len(PROMPT), arrived_at=0.0), EOS)


def reason_after(completion: list[int], **params: object) -> FinishReason | None:
    finish = finish_after(completion, **params)
    return None if finish is None else finish.reason


@pytest.mark.parametrize(
    ("completion", "params", "finish"),
    [
        ([4], {}, None),
        ([4, 7], {}, Finish(FinishReason.EOS, 7)),
        ([4, 7], {"ignore_eos": True}, None),
        ([4, 9], {"stop_token_ids": (9,)}, Finish(FinishReason.STOP_TOKEN, 9)),
        ([4, 9], {"stop_token_sequences": ((4, 9),)}, Finish(FinishReason.STOP_SEQUENCE)),
        # Tokens of the prompt stop nothing.
        ([9], {"stop_token_sequences": ((5, 9),)}, None),
        ([4] * 8, {}, Finish(FinishReason.MAX_TOKENS)),
        # If several stops apply to one token, the first in this order counts.
        ([4, 7], {"stop_token_ids": (7,), "stop_token_sequences": ((7,),)}, Finish(FinishReason.STOP_SEQUENCE)),
        ([4, 7], {"stop_token_ids": (7,)}, Finish(FinishReason.EOS, 7)),
    ],
)
def test_a_sequence_stops_for_the_first_reason_that_applies(
    completion: list[int], params: dict[str, object], finish: Finish | None
) -> None:
    assert finish_after(completion, **params) == finish


def test_nothing_stops_before_min_tokens() -> None:
    options = SamplingOptions(min_tokens=3)
    stops = {"stop_token_ids": (9,), "stop_token_sequences": ((4, 5),), "options": options}
    for early in ([4, 9], [4, 5], [4, 7]):
        assert reason_after(early, **stops) is None
    assert reason_after([1, 4, 9], **stops) is FinishReason.STOP_TOKEN
    assert reason_after([1, 4, 5], **stops) is FinishReason.STOP_SEQUENCE
    assert reason_after([1, 4, 7], **stops) is FinishReason.EOS
    assert reason_after([1, 4, 6], max_tokens=3, **stops) is FinishReason.MAX_TOKENS


def test_an_eos_that_is_the_only_token_a_grammar_allows_counts_before_min_tokens() -> None:
    options = SamplingOptions(min_tokens=3, grammar="any")
    assert reason_after([4, 7], options=options) is FinishReason.EOS
    assert reason_after([4, 7], options=options, ignore_eos=True) is None
    assert reason_after([4, 9], options=options, stop_token_ids=(9,)) is None


def test_only_tokens_that_may_stop_a_sequence_are_watched() -> None:
    params = SamplingParams(8, stop_token_ids=(9, 3), stop_token_sequences=((1, 2), (4, 3)))
    assert watched_tokens(params, EOS) == [2, 3, 7, 9]
    assert watched_tokens(SamplingParams(8, ignore_eos=True), EOS) == []
