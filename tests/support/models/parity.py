"""Comparison of our models with transformers': when two results count as the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.ops.native.isa import available_isas
from tests.support.models.paged_model import PagedModel
from tests.support.models.small_configs import VOCABULARY_SIZE
from tests.support.models.small_models import build_small_model, write_small_model

# Relative to the largest logit. Measured: float32 differs from float64 by 6e-6 at most, 5e-7 mostly.
LOGIT_TOLERANCE = 1e-4
# Relative likewise: closer logits may swap order between two float32 computations.
TIE = 1e-5
# A relative change of a weight that affects about the last bit in float32.
NUDGE = 1e-7
NUM_NUDGES = 3
MAX_NUM_TOKENS = 2048
# The native backend with less than this machine has; with all of it it is called `native`.
NATIVE_WITH_LESS = tuple(f"native {isa.value}" for isa in available_isas()[:-1])


def make_prompts(lengths: Sequence[int], *, seed: int = 3) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = Random(seed)
    return [[draw.randrange(VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


class TransformersModel:
    """transformers' model in float32, with alternative computations that are equally valid.

    An expert router, a token indexer and greedy sampling choose between scores. If two scores are equal within float32
    precision, either choice is right, and everything after it differs. A result is therefore accepted if it matches
    float32, float64, or float32 with every weight changed in its last bit.
    """

    def __init__(self, model: Any) -> None:
        """Wrap a float32 model, which is not modified."""
        self._models = [model]
        # The latest token ids, and their logits in each computation so far.
        self._latest: tuple[list[int], list[Tensor]] = ([], [])

    def all_logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits of every token, [num_tokens, vocabulary] as float64, in every computation, float32 first.

        Each computation runs only when its result is requested.
        """
        if self._latest[0] != token_ids:
            self._latest = (list(token_ids), [])
        known = self._latest[1]
        for number in range(2 + NUM_NUDGES):
            if number == len(known):
                known.append(self._compute(number, token_ids))
            yield known[number]

    @torch.no_grad()
    def _compute(self, number: int, token_ids: Sequence[int]) -> Tensor:
        logits: Tensor = self._model(number)(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.double()

    def _model(self, number: int) -> Any:
        while len(self._models) <= number:
            other = copy.deepcopy(self._models[0])
            self._models.append(other.double() if len(self._models) == 1 else _nudge(other, len(self._models)))
        return self._models[number]


@dataclass(frozen=True)
class SmallModel:
    """A small transformers model and its checkpoint."""

    theirs: TransformersModel
    directory: Path

    def load(self, backend: str, *, block_size: int = 16) -> PagedModel:
        """As `load_paged`."""
        return load_paged(self.directory, backend, block_size=block_size)


@dataclass
class SmallModels:
    """Builds and caches small models."""

    directory: Path
    _models: dict[tuple[str, str], SmallModel] = field(default_factory=dict)

    def get(self, architecture: str, variant: str) -> SmallModel:
        """The model of an entry of `SMALL_CONFIGS`."""
        key = (architecture, variant)
        if key not in self._models:
            model = build_small_model(architecture, variant)
            directory = write_small_model(model, self.directory / architecture / variant)
            self._models[key] = SmallModel(TransformersModel(model), directory)
        return self._models[key]


def load_paged(model_dir: Path, backend: str, *, block_size: int = 16) -> PagedModel:
    """Load our model of a checkpoint in float32.

    Args:
        backend: The backend's name, which may be followed by instructions: `native avx2`.
    """
    ops = load_ops(*backend.split())
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None)
    return PagedModel(loaded.model, ops, num_blocks=MAX_NUM_TOKENS // block_size + 64, block_size=block_size)


def wrong_rows(ours: Tensor, theirs: TransformersModel, token_ids: Sequence[int], *, first: int = 0) -> list[int]:
    """The indexes in `token_ids` whose logits match none of transformers' computations.

    Args:
        ours: [n, vocabulary]; the logits after the tokens from index `first` on.
        first: The index of the first row of `ours`.
    """
    wrong = torch.ones(len(ours), dtype=torch.bool)
    for logits in theirs.all_logits(token_ids):
        expected = logits[first : first + len(ours)]
        close = ((ours.double() - expected).abs() <= LOGIT_TOLERANCE * logits.abs().max()).all(-1)
        wrong &= ~close
        if not wrong.any():
            break
    return [first + row for row in wrong.nonzero().flatten().tolist()]


def wrong_tokens(theirs: TransformersModel, prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
    """The indexes in `completion` whose token is not a greedy choice: neither the best one nor tied with it."""
    token_ids = [*prompt, *completion]
    chosen = torch.tensor(completion)[:, None]
    wrong = torch.ones(len(completion), dtype=torch.bool)
    for logits in theirs.all_logits(token_ids):
        rows = logits[len(prompt) - 1 : -1]
        wrong &= rows.gather(1, chosen)[:, 0] < rows.amax(-1) - TIE * logits.abs().max()
        if not wrong.any():
            break
    return wrong.nonzero().flatten().tolist()


@torch.no_grad()
def _nudge(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=generator))
    return model
