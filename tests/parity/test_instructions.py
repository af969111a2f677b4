"""Every architecture in bfloat16, int8 and int4, with every set of instructions that this machine has.

`native` rounds activations too, so a router or a selection of tokens may choose differently where scores are close.
It is therefore compared with `reference` by the median of the rows' errors: a wrong tile makes all of them large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import Ops, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.native.isa import Isa, available_isas
from services.worker.parallel.communicator import SINGLE, Parallel
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import SmallModels, make_prompts
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.ranks.thread_ranks import run_ranks

# Blocks of one row, of less than a tile's 16, and of several tiles.
PROMPTS = make_prompts((1, 17, 90))
# Tokens at the end of a prompt that are computed once more, each by itself.
NUM_DECODED = 3
# A dense one; with windows and sinks; with experts; with latent attention, and a selection of tokens; with states.
FAST = (
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV32ForCausalLM",
    "Qwen3NextForCausalLM",
)


@dataclass(frozen=True, slots=True)
class Form:
    """What a model's matrices and activations are.

    Attributes:
        median: The most that the median of the rows' errors may be, relative to the largest logit. Measured: at most
            half of it, and 0.8 and more between rows of different tokens.
    """

    quantization: MatrixFormat | None
    dtype: torch.dtype
    median: float

    def median_on(self, isa: Isa) -> float:
        """The same for a set of instructions: tiles take 15 bits of an activation where vectors take 8."""
        has_planes = isa is Isa.AMX and self.quantization is MatrixFormat.INT8
        return 1e-3 if has_planes and self.dtype == torch.float32 else self.median


FORMS = {
    "bfloat16": Form(None, torch.bfloat16, 0.05),
    "int8": Form(MatrixFormat.INT8, torch.float32, 0.15),
    "int8 in bfloat16": Form(MatrixFormat.INT8, torch.bfloat16, 0.15),
    "int4 in bfloat16": Form(MatrixFormat.INT4, torch.bfloat16, 0.15),
}


def cases() -> Iterator[Any]:
    """Every configuration in every form; all but the first of each architecture are left to `make proofs`."""
    for architecture in ARCHITECTURES:
        for number, variant in enumerate(SMALL_CONFIGS[architecture]):
            later = () if architecture in FAST else pytest.mark.slow
            for form in FORMS:
                yield pytest.param(architecture, variant, form, marks=pytest.mark.proof if number else later)


def logits_of(directory: Path, ops: Ops, form: Form, parallel: Parallel = SINGLE) -> Tensor:
    """Of every token of the prompts, the last of each twice: in a prefill, and by themselves; [rows, vocabulary]."""
    options = LoadOptions(quantization=form.quantization)
    model = load_model(directory, ops, form.dtype, lambda _: None, options=options, parallel=parallel).model
    paged, rows = PagedModel(model, ops, num_blocks=64), []
    for prompt in PROMPTS:
        rows.append(paged.prefill_all(paged.add(prompt)))
        num_first = max(1, len(prompt) - NUM_DECODED)
        sequence = paged.add(prompt[:num_first])
        rows.append(paged.prefill([sequence]))
        for token in prompt[num_first:]:
            sequence.token_ids.append(token)
            rows.append(paged.extend([sequence], [1], is_prefill=False))
    return torch.cat(rows).float()


def median_error(logits: Tensor, expected: Tensor) -> float:
    """The median over rows of the largest difference, relative to the largest logit of all."""
    return float((logits - expected).abs().amax(-1).median() / expected.abs().max())


@pytest.mark.parametrize(("architecture", "variant", "form"), list(cases()))
def test_every_set_of_instructions_computes_what_the_weights_say(
    small_models: SmallModels, architecture: str, variant: str, form: str
) -> None:
    directory, each = small_models.get(architecture, variant).directory, FORMS[form]
    expected = logits_of(directory, PackingOps(), each)
    for isa in available_isas():
        logits = logits_of(directory, load_ops("native", isa.value), each)
        assert logits.isfinite().all(), isa
        assert median_error(logits, expected) <= each.median_on(isa), isa


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("architecture", [FAST[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAST[1:])])
def test_so_do_two_ranks_that_agree_in_every_bit(small_models: SmallModels, architecture: str, form: str) -> None:
    directory = small_models.get(architecture, next(iter(SMALL_CONFIGS[architecture]))).directory
    layouts, each = [RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)], FORMS[form]

    def run(make_ops: Callable[[], Ops]) -> list[Tensor]:
        # Each rank has its own, as a process has: their buffers are for one pass at a time.
        return run_ranks(layouts, lambda parallel: logits_of(directory, make_ops(), each, parallel), is_exact=False)

    # The values of int8 are those of parts of rows, as ranks have them.
    expected, _ = run(PackingOps)
    for isa in available_isas():
        first, second = run(partial(load_ops, "native", isa.value))
        assert torch.equal(first, second), isa
        assert median_error(first, expected) <= each.median_on(isa), isa
