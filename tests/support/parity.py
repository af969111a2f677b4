"""Our models beside transformers': when two results are the same."""

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
from tests.support.paged_model import PagedModel
from tests.support.small_configs import VOCABULARY_SIZE
from tests.support.small_models import build_small_model, write_small_model

# Relative to the largest logit. Measured: float32 differs from float64 by 6e-6 at most, 5e-7 mostly.
LOGIT_TOLERANCE = 1e-4
# Relative likewise: two logits that are closer may change places from one float32 computation to another.
TIE = 1e-5
# A weight changed by as much is the same one in float32, give or take its last bit.
NUDGE = 1e-7
NUM_NUDGES = 3
MAX_NUM_TOKENS = 2048


def make_prompts(lengths: Sequence[int], *, seed: int = 3) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = Random(seed)
    return [[draw.randrange(VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


class TransformersModel:
    """transformers' model: in float32, and where that cannot decide, in computations which are as good.

    A router that picks experts, an indexer that picks tokens and a greedy choice decide between scores. Where two
    are as near as float32 can tell, either choice is right, and all that follows differs. So a result counts when
    it is that of float32, or that of float64, or one of float32 with every weight off by its last bit.
    """

    def __init__(self, model: Any) -> None:
        """Take a float32 model; it is not changed."""
        self._models = [model]
        # Of the latest tokens: the logits of each computation so far.
        self._latest: tuple[list[int], list[Tensor]] = ([], [])

    def all_logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """The logits of every token, [num_tokens, vocabulary] in float64, in every computation, float32's first.

        The others are computed when they are asked for.
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
    """A small model as transformers has it, and its checkpoint."""

    theirs: TransformersModel
    directory: Path

    def load(self, backend: str, *, block_size: int = 16) -> PagedModel:
        """Ours, from the checkpoint."""
        return load_paged(self.directory, backend, block_size=block_size)


@dataclass
class SmallModels:
    """Makes each small model once."""

    directory: Path
    _models: dict[tuple[str, str], SmallModel] = field(default_factory=dict)

    def get(self, architecture: str, variant: str) -> SmallModel:
        """A model of `SMALL_CONFIGS`."""
        key = (architecture, variant)
        if key not in self._models:
            model = build_small_model(architecture, variant)
            directory = write_small_model(model, self.directory / architecture / variant)
            self._models[key] = SmallModel(TransformersModel(model), directory)
        return self._models[key]


def load_paged(model_dir: Path, backend: str, *, block_size: int = 16) -> PagedModel:
    """Our model of a checkpoint, in float32."""
    ops = load_ops(backend)
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None)
    return PagedModel(loaded.model, ops, num_blocks=MAX_NUM_TOKENS // block_size + 64, block_size=block_size)


def wrong_rows(ours: Tensor, theirs: TransformersModel, token_ids: Sequence[int], *, first: int = 0) -> list[int]:
    """The places in `token_ids` whose logits are none that transformers gives.

    Args:
        ours: [n, vocabulary]: the logits behind the tokens from `first` on.
        theirs: The model.
        token_ids: All tokens.
        first: Where `ours` begins.
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
    """The places in `completion` whose token is no greedy choice: neither the best one nor one that ties with it."""
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
