"""How a family that runs transformers' own code is compared with transformers: one row of the proof table.

Rows have an architecture, a way of computing, a backend, and a number of ranks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.worker.layout import RankLayout
from services.worker.models.generic.split import SplitPlan
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import Ops, load_ops
from services.worker.ops.matrices import dense
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import SINGLE, Parallel
from services.worker.weights.quantization.quantize import quantize
from tests.support.models.generation import Generated, Way, generate
from tests.support.models.generic_configs import GENERIC_CONFIGS
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import MAX_NUM_TOKENS, TransformersModel, make_prompts, wrong_rows, wrong_tokens
from tests.support.models.small_models import build_model, write_small_model
from tests.support.pairwise import pairwise_rows
from tests.support.ranks.thread_ranks import run_ranks

NUM_TOKENS = 24
# Shorter than a block, longer than every window, at a block's boundary.
PROMPT_LENGTHS = (5, 70, 16)
INT8 = "int8"
"""`reference` with matrices in int8, of whose values it makes dense copies: `native` rounds the other side too."""
BACKENDS = ("cpu", "native", "reference", INT8)
WAYS = {
    "whole": Way(),
    "chunks": Way(chunk_size=7),
    "mixed": Way(chunk_size=16, is_mixed=True),
    "prefix": Way(has_prefix=True),
    "prefix-mixed": Way(block_size=32, chunk_size=16, is_mixed=True, has_prefix=True),
    "preempted": Way(chunk_size=16, is_mixed=True, is_preempted=True),
}
RANKS = (1, 2)


@dataclass(frozen=True, slots=True)
class ProofRow:
    """What is computed in one row of the table, and how."""

    architecture: str
    way: str
    backend: str
    num_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.architecture}-{self.way}-{self.backend}-{self.num_ranks}"


def all_rows() -> list[ProofRow]:
    """Every pair of two factors' values; an architecture without a plan for several ranks has one."""
    factors = {
        "architecture": tuple(GENERIC_CONFIGS),
        "way": tuple(WAYS),
        "backend": BACKENDS,
        "num_ranks": RANKS,
    }
    rows = [ProofRow(**row) for row in pairwise_rows(factors, seed=1)]
    return sorted({row if has_plan(row.architecture) else _on_one_rank(row) for row in rows}, key=str)


def has_plan(architecture: str) -> bool:
    """Whether transformers says how to split it."""
    model_class: Any = getattr(__import__("transformers"), architecture)
    return bool(model_class.config_class.base_model_tp_plan)


@dataclass
class ProofModels:
    """Small models of all architectures, each made once, and what their quantised weights stand for."""

    directory: Path
    _models: dict[str, Any] = field(default_factory=dict)
    _theirs: dict[tuple[str, int | None], TransformersModel] = field(default_factory=dict)

    def directory_of(self, architecture: str) -> Path:
        """The checkpoint of an architecture."""
        directory = self.directory / architecture
        if architecture not in self._models:
            self._models[architecture] = build_model(architecture, GENERIC_CONFIGS[architecture])
            write_small_model(self._models[architecture], directory)
        return directory

    def whole_layers(self, architecture: str) -> list[str] | None:
        """Kinds of layers that each of several ranks computes whole, as the log of a start names them.

        None if there is no plan for several ranks.
        """
        if not has_plan(architecture):
            return None
        self.directory_of(architecture)
        model = self._models[architecture]
        experts = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
        names = [
            name
            for name, module in model.named_modules()
            if type(module) is nn.Linear
            and module is not model.get_output_embeddings()
            and not _is_gate(name, module, experts)
        ]
        return SplitPlan(model, RANKS[-1]).whole_layers(names)

    def theirs(self, architecture: str, int8_ranks: int | None = None) -> TransformersModel:
        """transformers' model; with `int8_ranks`, the values that weights in int8 have on as many ranks."""
        key = architecture, int8_ranks
        if key not in self._theirs:
            self.directory_of(architecture)
            model = self._models[architecture]
            self._theirs[key] = TransformersModel(model if int8_ranks is None else int8_values(model, int8_ranks))
        return self._theirs[key]


def wrong_places(models: ProofModels, row: ProofRow) -> list[tuple[int, str, int]]:
    """Greedy completions beside each other: where tokens or log-probabilities are not transformers'; all ranks agree.

    Returns:
        The prompt's number, which of both, and the index of the token.
    """
    directory = models.directory_of(row.architecture)
    ranks = _generate_on_ranks(directory, row)
    for rank in ranks[1:]:
        for one, other in zip(ranks[0], rank, strict=True):
            assert one.completion == other.completion
            assert torch.equal(one.logits, other.logits)
    theirs = models.theirs(row.architecture, row.num_ranks if row.backend == INT8 else None)
    wrong = []
    for number, each in enumerate(ranks[0]):
        wrong += [(number, "token", place) for place in wrong_tokens(theirs, each.prompt, each.completion)]
        tokens, first = each.prompt + each.completion, len(each.prompt) - 1
        wrong += [(number, "logits", place) for place in wrong_rows(each.logits, theirs, tokens, first=first)]
    return wrong


def load_paged(directory: Path, row: ProofRow, parallel: Parallel = SINGLE) -> PagedModel:
    """A rank's part of a model, as a row has it."""
    is_packed = row.backend == INT8
    ops: Ops = PackingOps() if is_packed else load_ops(row.backend)
    options = LoadOptions(quantization=MatrixFormat.INT8 if is_packed else None)
    loaded = load_model(directory, ops, torch.float32, lambda _: None, options=options, parallel=parallel)
    assert loaded.model.implementation == "transformers"
    block_size = WAYS[row.way].block_size
    return PagedModel(loaded.model, ops, num_blocks=MAX_NUM_TOKENS // block_size + 64, block_size=block_size)


def _generate_on_ranks(directory: Path, row: ProofRow) -> list[Sequence[Generated]]:
    prompts = make_prompts(PROMPT_LENGTHS)

    def run(parallel: Parallel) -> Sequence[Generated]:
        return generate(load_paged(directory, row, parallel), prompts, NUM_TOKENS, WAYS[row.way])

    if row.num_ranks == 1:
        return [run(SINGLE)]
    layouts = [RankLayout(tp_rank=rank, tp_size=row.num_ranks) for rank in range(row.num_ranks)]
    return run_ranks(layouts, run, is_exact=False)


def _on_one_rank(row: ProofRow) -> ProofRow:
    return ProofRow(row.architecture, row.way, row.backend)


@torch.no_grad()
def int8_values(model: Any, num_ranks: int) -> Any:
    """A copy of transformers' model with the values of weights in int8.

    Each row of a matrix has a scale, and so has each rank's part of it where ranks have parts of the inputs. Gates,
    other parameters, and embeddings that are not the head too keep their values.
    """
    copied = copy.deepcopy(model)
    by_inputs = _split_by_inputs(model, num_ranks)
    embedding, head = copied.get_input_embeddings(), copied.get_output_embeddings()
    is_one = head.weight is embedding.weight and type(embedding) is nn.Embedding
    experts = {name: module for name, module in copied.named_modules() if hasattr(module, "is_concatenated")}
    for name, module in copied.named_modules():
        if type(module) is nn.Linear and not _is_gate(name, module, experts):
            num_parts = num_ranks if any(pattern.fullmatch(name) for pattern in by_inputs) else 1
            module.weight = nn.Parameter(_int8(module.weight, num_parts), requires_grad=False)
    if is_one:
        embedding.weight = head.weight
    for module in experts.values():
        for matrix in module.gate_up_proj:
            matrix.copy_(_int8(matrix, 1))
        for matrix in module.down_proj:
            matrix.copy_(_int8(matrix, num_ranks))
    return copied


def _split_by_inputs(model: Any, num_ranks: int) -> list[re.Pattern[str]]:
    if num_ranks == 1:
        return []
    plan = model.config.base_model_tp_plan
    # Where norms have weights for each head, attention is whole.
    is_whole = getattr(model.config, "use_qk_norm", False) and model.config.model_type == "cohere"
    names = [
        f"{model.base_model_prefix}.{name}"
        for name, style in plan.items()
        if style == "rowwise" and not (is_whole and "self_attn" in name)
    ]
    return [re.compile(name.replace(".", r"\.").replace("*", r"\d+")) for name in names]


def _is_gate(name: str, module: nn.Linear, experts: dict[str, Any]) -> bool:
    """Whether it weighs experts: one row for each, or a single row."""
    blocks = {each.rpartition(".")[0]: module.down_proj.shape[0] for each, module in experts.items()}
    return any(
        name.startswith(f"{block}.") and module.out_features in (1, num_experts)
        for block, num_experts in blocks.items()
    )


def _int8(weight: Tensor, num_parts: int) -> Tensor:
    num_rows, num_columns = weight.shape[0], weight.shape[1] // num_parts
    parts = (part.contiguous() for part in torch.split(weight, num_columns, dim=1))
    matrices = [quantize([part], (num_rows, num_columns), MatrixFormat.INT8) for part in parts]
    return torch.cat([dense(matrix, torch.float32) for matrix in matrices], dim=1)
