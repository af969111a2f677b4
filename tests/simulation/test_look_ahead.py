"""Look-ahead admission against the plain rule, on a load that the KV pool cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from services.scheduler.cell.events import ClientMessage, Submission
from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.policy import SchedulerPolicy
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from tests.simulation.parts.worker import duration_of_step_s
from tests.support.scheduler.cell_model import VOCABULARY
from tests.support.scheduler.engine_driver import EngineDriver, token_bytes

NUM_REQUESTS = 250
MAX_TOKENS = 100
# 10 of 1000 tokens stop a request, so about a third of all requests reach MAX_TOKENS.
STOP_TOKEN_IDS = tuple(range(100, 110))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of serving the load under one policy."""

    num_preemptions: int
    tokens_per_s: float


def serve_all(seed: int, admission_policy: AdmissionPolicy) -> Outcome:
    """Serve requests that all wait from the start; the KV pool holds about 30 of the 64 that have a slot."""
    rng = Random(seed)
    # No request ages, so the order of arrival applies throughout.
    policy = SchedulerPolicy(
        max_num_seqs=64, max_num_batched_tokens=2048, admission_policy=admission_policy, max_age_s=1e9
    )
    driver = EngineDriver(num_blocks=200, policy=policy, depth=2)
    driver.on_event(ClientMessage(1, [draw_submission(rng, handle) for handle in range(NUM_REQUESTS)]))
    duration_s = 0.0
    while driver.sent:
        chunks = [enter.chunk for enter in driver.sent[0].batch.enters]
        duration_s += duration_of_step_s(sum(chunk.num_tokens for chunk in chunks))
        driver.step()
    num_tokens = sum(len(output.tokens) for output in driver.choices.values())
    return Outcome(driver.engine.state().counters.num_preemptions, num_tokens / duration_s)


def draw_submission(rng: Random, handle: int) -> Submission:
    """Draw a request whose completion length is unpredictable."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(16, 96))]
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=rng.getrandbits(64), stop_token_ids=STOP_TOKEN_IDS)
    return Submission(RequestHandle(handle), f"r{handle}", token_bytes(prompt), params)


def test_looking_ahead_preempts_less_at_equal_throughput() -> None:
    plain = serve_all(1, AdmissionPolicy.PLAIN)
    ahead = serve_all(1, AdmissionPolicy.LOOK_AHEAD)
    assert ahead.num_preemptions < plain.num_preemptions / 20
    assert ahead.tokens_per_s > 0.97 * plain.tokens_per_s
