"""What one run serves: a cell's settings, and requests with the answers they must get. All drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from services.scheduler.admission import AdmissionPolicy
from services.scheduler.policy import CacheSettings, SchedulerPolicy
from services.scheduler.retraction import RetractionPolicy
from services.scheduler.sequence import Finish, FinishReason, Priority
from services.scheduler.waiting_queue import QueuePolicy
from services.worker.input_batch import BatchLimits
from shared.limits import SamplingParams
from tests.simulation.faults import Fault, FaultMix
from tests.support.cell_model import VOCABULARY, expected_completion

CONTEXT_LENGTH = 192
EOS_TOKEN_IDS = tuple(range(7, 22))

_MAX_PROMPT_TOKENS = 96
_MAX_COMPLETION_TOKENS = 56
MAX_REQUEST_TOKENS = _MAX_PROMPT_TOKENS + _MAX_COMPLETION_TOKENS
# A seed's low bits tell which request it is: that is how steps, which name only slots, are told apart.
_NUMBER_BITS = 20


@dataclass(frozen=True, slots=True)
class CellSettings:
    """The settings of one run's scheduler and worker."""

    policy: SchedulerPolicy
    cache: CacheSettings
    num_blocks: int
    # Arrivals pause while so many requests are under way.
    max_live_requests: int
    mean_gap_s: float

    @property
    def batch_limits(self) -> BatchLimits:
        """What scheduler and worker agree on."""
        return BatchLimits(
            self.policy.max_num_seqs,
            self.policy.max_num_batched_tokens,
            self.cache.block_size,
            self.num_blocks,
            CONTEXT_LENGTH,
            VOCABULARY,
        )

    @classmethod
    def draw(cls, rng: Random, mix: FaultMix) -> CellSettings:
        """Draw the settings of a cell: tiny to roomy pools, every policy."""
        block_size = rng.choice([1, 16, 16, 32])
        max_num_seqs = rng.choice([1, 3, 8, 12])
        max_num_batched_tokens = rng.choice([16, 48, 600])
        mixes = rng.random() < 0.3
        max_waiting_requests = rng.randint(3, 10) if Fault.QUEUE_FULL in mix.rates else 1024
        policy = SchedulerPolicy(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            delay_factor=rng.choice([0.0, 0.0, 1.5]),
            max_steps_in_flight=rng.randint(1, 4),
            enable_chunked_prefill=mixes or max_num_batched_tokens < CONTEXT_LENGTH or rng.random() < 0.5,
            enable_mixed_steps=mixes,
            max_waiting_requests=max_waiting_requests,
            queue_policy=rng.choice(list(QueuePolicy)),
            max_age_s=rng.choice([0.5, 10.0]),
            admission_policy=rng.choice(list(AdmissionPolicy)),
            retraction_policy=rng.choice(list(RetractionPolicy)),
            share_in_step=rng.random() < 0.5,
        )
        # The smallest pool just holds the longest request.
        num_pool_tokens = rng.choice([160, 160, 256, 800])
        return cls(
            policy,
            CacheSettings(block_size, rng.random() < 0.8),
            num_pool_tokens // block_size,
            # Of those that find the queue full, only some at a time.
            max_live_requests=min(rng.choice([6, 16, 24]), max_num_seqs + max_waiting_requests + 2),
            mean_gap_s=rng.choice([0.002, 0.03]),
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What an undisturbed run says: the tokens of the completion, and why it finished."""

    tokens: list[int]
    finish: Finish


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request: what its client asks for and will do, and what must come of it.

    `by_cell` is what the cell comes to by itself, `by_text` what the client is told: the stop string, whose last
    token is `text_stop_token`, may end it earlier.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    priority: Priority
    cache_salt: bytes
    text_stop_token: int | None
    patience_s: float | None
    cancel_after_s: float | None
    abort_call_after_s: float | None
    by_cell: Expected
    by_text: Expected

    @property
    def request_id(self) -> str:
        """Its id."""
        return f"r{self.number}"


def number_of(seed: int) -> int:
    """The number of the request whose sampling seed this is."""
    return seed & (1 << _NUMBER_BITS) - 1


class Workload:
    """Draws one request after the other; prompts share prefixes."""

    def __init__(self, rng: Random, mix: FaultMix) -> None:
        self._rng = rng
        self._mix = mix
        self._num_drawn = 0
        self._prefixes = [[rng.randrange(VOCABULARY) for _ in range(_MAX_PROMPT_TOKENS)] for _ in range(3)]
        self._shares_prompts = rng.random() < 0.7
        self._completion_scale = rng.choice([8, 30, _MAX_COMPLETION_TOKENS])

    def draw(self) -> RequestPlan:
        """The next request."""
        rng, number = self._rng, self._num_drawn
        self._num_drawn += 1
        prompt = self._draw_prompt()
        max_tokens = rng.randint(1, self._completion_scale)
        seed = rng.getrandbits(64 - _NUMBER_BITS) << _NUMBER_BITS | number
        completion = expected_completion(prompt, seed, max_tokens)
        params = self._draw_params(completion, seed)
        text_stop_token = completion[rng.randrange(max_tokens)] if self._strikes(Fault.TEXT_STOP) else None
        return RequestPlan(
            number,
            prompt,
            params,
            priority=rng.choice(list(Priority)),
            cache_salt=rng.choice([b"", b"", b"salt"]),
            text_stop_token=text_stop_token,
            patience_s=rng.choice([0.02, 0.3, 3.0, 30.0]) if self._strikes(Fault.DEADLINE) else None,
            cancel_after_s=rng.choice([0.0, 0.05, 0.5, 5.0]) if self._strikes(Fault.CANCEL) else None,
            abort_call_after_s=rng.choice([0.0, 0.05, 0.5, 5.0]) if self._strikes(Fault.ABORT_CALL) else None,
            by_cell=_expect(completion, params, None),
            by_text=_expect(completion, params, text_stop_token),
        )

    def _draw_prompt(self) -> list[int]:
        rng = self._rng
        length = rng.choice([1, 15, 16, 17, 32, 33, 48, 65, _MAX_PROMPT_TOKENS])
        num_shared = rng.choice([0, length // 2, length - 1, length]) if self._shares_prompts else 0
        shared = rng.choice(self._prefixes)[:num_shared]
        return shared + [rng.randrange(VOCABULARY) for _ in range(length - num_shared)]

    def _draw_params(self, completion: list[int], seed: int) -> SamplingParams:
        rng = self._rng
        at = rng.randrange(len(completion))
        stop_token_ids = (completion[at],) if rng.random() < 0.15 else ()
        stop_sequence = tuple(completion[max(0, at - rng.randint(0, 3)) : at + 1])
        return SamplingParams(
            max_tokens=len(completion),
            seed=seed,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=stop_token_ids,
            stop_token_sequences=(stop_sequence,) if rng.random() < 0.15 else (),
        )

    def _strikes(self, fault: Fault) -> bool:
        return self._mix.strikes(fault, self._rng)


def _expect(completion: list[int], params: SamplingParams, text_stop_token: int | None) -> Expected:
    """The part of a completion up to its first stop.

    A stop string is looked for in the text, and the token that ends a completion by EOS or a stop token has none.
    """
    for length in range(1, len(completion) + 1):
        tokens = completion[:length]
        finish = _find_finish(tokens, params)
        is_silent = finish is not None and finish.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        if tokens[-1] == text_stop_token and not is_silent:
            return Expected(tokens, Finish(FinishReason.STOP_STRING))
        if finish is not None:
            return Expected(tokens, finish)
    raise AssertionError("a completion always ends")


def _find_finish(tokens: list[int], params: SamplingParams) -> Finish | None:
    """Why the cell ends a completion after its newest token, written down once more from DESIGN section 3."""
    last = tokens[-1]
    for sequence in params.stop_token_sequences:
        if tuple(tokens[-len(sequence) :]) == sequence:
            return Finish(FinishReason.STOP_SEQUENCE)
    if last in EOS_TOKEN_IDS and not params.ignore_eos:
        return Finish(FinishReason.EOS, last)
    if last in params.stop_token_ids:
        return Finish(FinishReason.STOP_TOKEN, last)
    if len(tokens) == params.max_tokens:
        return Finish(FinishReason.MAX_TOKENS)
    return None
