"""Every architecture through all three services: greedy tokens equal transformers', with and without drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lockstep.v1 import scheduler_pb2, tokenizer_pb2
from services.worker.ops import BACKEND_NAMES
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.cells.cell import FLOAT32, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.models.generation import Way, generate
from tests.support.models.parity import SmallModels, TransformersModel, load_paged, make_prompts, wrong_tokens
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.models.small_mtp import MTP_ARCHITECTURES, make_small_mtp_model
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.processes import WITHOUT_COMPILER

# Windows, sinks, biases and experts; the fast test of drafts adds latent attention and shared experts.
SERVED_FAST = ("GptOssForCausalLM",)
# Softmax and sigmoid routers; windows by layer; recurrent state. The others are left to `make proofs`.
SERVED_SLOW = ("MixtralForCausalLM", "Gemma3ForCausalLM", "Qwen3NextForCausalLM")
# A second request with a prefix that has no saved state finds that out, and saves it; the third one continues from it.
RECURRENT = ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
# On Triton's kernels.
SERVED_BY_TRITON = "LlamaForCausalLM"
PROMPTS = make_prompts((1, 70, 16, 40, 5, 33, 100, 40), seed=9)
NUM_TOKENS = 32
# Chunked prompts in the same steps as decodes.
CHUNKS = ("--scheduler.max-num-seqs=8", "--scheduler.max-num-batched-tokens=32", "--scheduler.enable-mixed-steps=true")


def serve_cases() -> list[Any]:
    """Each architecture without a test of its own, on one backend, since `tests/parity` covers all.

    Those with recurrent layers are among them: drafts have rules of their own there.
    """
    marks = dict.fromkeys(SERVED_SLOW, pytest.mark.slow) | dict.fromkeys(SERVED_FAST, ())
    others = {SERVED_BY_TRITON, *MTP_ARCHITECTURES} - {*RECURRENT}
    rest = [name for name in ARCHITECTURES if name not in others]
    return [
        pytest.param(
            architecture,
            BACKEND_NAMES[number % len(BACKEND_NAMES)],
            marks=marks.get(architecture, pytest.mark.proof),
        )
        for number, architecture in enumerate(rest)
    ]


async def ask(
    model_dir: Path, backend: str, *flags: str, num_rounds: int = 1
) -> tuple[list[list[int]], scheduler_pb2.GetStateResponse]:
    """The completions of `PROMPTS`, all sent at once, `num_rounds` times; they must be equal each time."""
    takes_over = backend == "cpu"
    flags = (f"--worker.ops-backend={'native' if takes_over else backend}", "--worker.num-threads=1", *FLOAT32, *flags)
    with start_cell(model_dir, *flags, environment=WITHOUT_COMPILER if takes_over else None) as cell:
        assert ("the cpu backend takes over" in cell.log()) is takes_over
        async with connect(cell) as client:
            rounds = [await asyncio.gather(*map(client.generate, requests())) for _ in range(num_rounds)]
            state = await client.wait_until_idle()
    tokens = [[completion.token_ids for completion in completions] for completions in rounds]
    if backend == "reference":
        assert all(each == tokens[0] for each in tokens)
    return [completion for each in tokens for completion in each], state


def requests() -> list[tokenizer_pb2.GenerateRequest]:
    return [token_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]


def exact_tokens(model_dir: Path) -> list[list[int]]:
    """The completions of the bare model on `reference`, without any service."""
    completions = generate(load_paged(model_dir, "reference"), PROMPTS, NUM_TOKENS, Way())
    return [each.completion for each in completions]


def assert_greedy(theirs: TransformersModel, completions: list[list[int]]) -> None:
    for number, completion in enumerate(completions):
        assert len(completion) == NUM_TOKENS
        assert wrong_tokens(theirs, PROMPTS[number % len(PROMPTS)], completion) == []


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("small-models"))


@pytest.mark.parametrize(("architecture", "backend"), serve_cases())
async def test_tokens_are_those_of_transformers(small_models: SmallModels, architecture: str, backend: str) -> None:
    small = small_models.get(architecture, next(iter(SMALL_CONFIGS[architecture])))
    num_rounds = 3 if architecture in RECURRENT else 2
    completions, state = await ask(small.directory, backend, *CHUNKS, num_rounds=num_rounds)
    assert_greedy(small.theirs, completions)
    assert state.num_prefix_hit_tokens > 0
    if backend == "reference":
        assert completions[: len(PROMPTS)] == exact_tokens(small.directory)


@pytest.mark.slow
async def test_a_dense_model_is_served_by_triton_kernels(small_models: SmallModels) -> None:
    """On a machine without a GPU the kernels run in Triton's interpreter, which computes a few tokens a second."""
    small = small_models.get(SERVED_BY_TRITON, next(iter(SMALL_CONFIGS[SERVED_BY_TRITON])))
    prompts = PROMPTS[:3]
    flags = ("--worker.ops-backend=triton", "--worker.dtype=float32", "--worker.num-threads=1", *CHUNKS)
    with start_cell(small.directory, *flags) as cell:
        async with connect(cell) as client:
            requests = [token_request(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
            completions = await asyncio.gather(*map(client.generate, requests))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 4
        assert wrong_tokens(small.theirs, prompt, completion.token_ids) == []


@pytest.mark.parametrize(
    ("architecture", "num_mtp_layers"),
    [
        pytest.param(architecture, count, marks=(pytest.mark.proof,) if number else ())
        for number, (architecture, count) in enumerate(MTP_ARCHITECTURES.items())
    ],
)
async def test_drafts_by_multi_token_prediction_change_no_token(
    tmp_path: Path, architecture: str, num_mtp_layers: int
) -> None:
    variant = next(iter(SMALL_CONFIGS[architecture]))
    small = make_small_mtp_model(architecture, variant, tmp_path, num_mtp_layers=num_mtp_layers, has_sure_drafts=True)
    flags = ("--draft-proposer=mtp", "--worker.num-draft-tokens=3")
    completions, state = await ask(small.directory, "reference", *CHUNKS, *flags, num_rounds=2)
    assert completions[: len(PROMPTS)] == exact_tokens(small.directory)
    assert_greedy(TransformersModel(small.model), completions)
    # The test is meaningful only if some drafts are accepted and some rejected.
    assert 0 < state.num_accepted_draft_tokens < state.num_draft_tokens


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(tmp_path: Path) -> None:
    """How a whole cell ends when its model cannot be loaded is tested in `test_broken_models.py`."""
    model_dir = write_tiny_llama(tmp_path / "model", changes={"architectures": ["BloomForCausalLM"]})
    with pytest.raises(ModelDirectoryError, match="BloomForCausalLM") as error:
        load_paged(model_dir, "reference")
    assert [name for name in ARCHITECTURES if name not in str(error.value)] == []
