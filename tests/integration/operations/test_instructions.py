"""Cells with and without the best instructions of this machine, and where the system refuses them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.worker.ops.native.isa import Isa, available_isas
from tests.support.cells.cell import start_cell
from tests.support.kernels.without_tiles import refuse_tiles

pytestmark = [pytest.mark.slow, pytest.mark.process]

# Longer than tiles are high; decodes have one row.
PROMPT = [5 + 7 * place % 300 for place in range(100)]
NUM_TOKENS = 24
# The mean difference of log-probabilities, whose values are some -6. Measured: 0.06 for activations of 15 bits and 8.
TOLERANCE = 0.2


def answer_of_cell(model_dir: Path, *flags: str) -> tuple[list[int], list[float], list[float]]:
    """What a new cell says: tokens, and the log-probabilities of the prompt and of these."""
    sampling = common_pb2.SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=0, num_prompt_logprobs=0
    )
    prompt = common_pb2.TokenSequence(token_ids=PROMPT)
    request = tokenizer_pb2.GenerateRequest(tokens=prompt, sampling=sampling)
    with start_cell(model_dir, *flags) as cell, cell.stub() as stub:
        answer = stub.Complete(tokenizer_pb2.CompleteRequest(request=request))
    choice = answer.choices[0]
    of_prompt, of_tokens = (
        [position.token.logprob for position in positions]
        for positions in (answer.prompts[0].prompt_logprobs, choice.logprobs)
    )
    return list(choice.token_ids), of_prompt, of_tokens


@pytest.mark.skipif(len(available_isas()) < 2, reason="this processor has one set of instructions")
def test_two_ranks_give_a_prompt_the_same_probabilities_with_the_best_instructions_and_the_next(
    tiny_model: Path,
) -> None:
    (_, next_probabilities, _), (tokens, probabilities, _) = (
        answer_of_cell(tiny_model, "--tp=2", "--worker.num-threads=1", f"--worker.native-isa={isa.value}")
        for isa in available_isas()[-2:]
    )
    assert len(tokens) == NUM_TOKENS
    difference = fmean(abs(one - other) for one, other in zip(probabilities, next_probabilities, strict=True))
    assert difference <= TOLERANCE


@pytest.mark.skipif(Isa.AMX not in available_isas(), reason="no tiles to refuse")
def test_a_cell_to_which_the_system_refuses_tiles_answers_as_one_without_them(tiny_model: Path) -> None:
    # A filter of system calls is a thread's own, and that of the processes that it starts.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(refuse_tiles).result()
        refused = pool.submit(answer_of_cell, tiny_model).result()
    best_without = available_isas()[-2].value
    assert refused == answer_of_cell(tiny_model, f"--worker.native-isa={best_without}")
    # Activations of 15 bits instead of 8: so tiles were refused.
    assert refused != answer_of_cell(tiny_model)
