"""Models on a changed backend `aiter`, to see whether its proofs notice: a process that answers lines with lines.

Each line is a `Mutation` in JSON, answered with an `Outcome`. The stand-ins' error is an outcome too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import torch

from services.worker.models.loader import load_model
from services.worker.ops import Ops, load_ops
from tests.support.aiter import triton_standins
from tests.support.models.generation import Way, generate
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import make_prompts

_PACKAGE = "services.worker.ops.aiter_ops"
# Each after those that it imports.
_MODULES = ("elementwise", "linear", "attention", "experts", "backend")
_PROMPTS = make_prompts((5, 40), seed=6)
_NUM_TOKENS = 6
_TIE = 0.5


@dataclass(frozen=True)
class Mutation:
    """One change of the backend's sources, and a model that needs what is changed."""

    model_dir: str = ""
    module: str = ""
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a model on the backend computed, compared with `cpu` on the same tokens."""

    error: str
    """Empty if it computed something."""
    num_wrong: int
    """Tokens that are not almost the best ones."""
    num_tokens: int
    difference: float
    """The largest one of a logit."""


def main() -> None:
    """Answer every line."""
    torch.set_num_threads(1)
    triton_standins.install()
    for line in sys.stdin:
        print(json.dumps(asdict(_run(Mutation(**json.loads(line))))), flush=True)  # noqa: T201


def _run(mutation: Mutation) -> Outcome:
    try:
        with _mutated(mutation) as backend:
            return _compare(backend.AiterOps(), Path(mutation.model_dir))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the stand-ins and AITER refuse with
        return Outcome(f"{type(error).__name__}: {error}", 0, 0, 0.0)


@contextmanager
def _mutated(mutation: Mutation) -> Iterator[ModuleType]:
    """The module `backend`, executed again with the changed source; restored at the end."""
    try:
        yield _execute(mutation)
    finally:
        _execute(Mutation())


def _execute(mutation: Mutation) -> ModuleType:
    for name in _MODULES:
        module = import_module(f"{_PACKAGE}.{name}")
        assert module.__file__
        source = Path(module.__file__).read_text(encoding="utf-8")
        if name == mutation.module:
            assert source.count(mutation.before) == 1, mutation
            source = source.replace(mutation.before, mutation.after)
        with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as file:
            file.write(source)
            file.flush()
            SourceFileLoader(module.__name__, file.name).exec_module(module)
    return import_module(f"{_PACKAGE}.backend")


@torch.inference_mode()
def _compare(ops: Ops, model_dir: Path) -> Outcome:
    paged, expected = (_load(model_dir, each) for each in (ops, load_ops("cpu")))
    num_wrong, difference = 0, 0.0
    generated = generate(paged, _PROMPTS, _NUM_TOKENS, Way(chunk_size=16, has_prefix=True))
    for each in generated:
        rows = expected.prefill_all(expected.add(each.prompt + each.completion)).float()[len(each.prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(each.completion)[:, None])[:, 0]
        num_wrong += int((~(rows.amax(dim=-1) - chosen <= _TIE)).sum())
        difference = max(difference, float((each.logits.float() - rows).abs().nan_to_num(torch.inf).max()))
    return Outcome("", num_wrong, len(generated) * _NUM_TOKENS, difference)


def _load(model_dir: Path, ops: Ops) -> PagedModel:
    return PagedModel(load_model(model_dir, ops, torch.bfloat16, lambda _: None).model, ops)


if __name__ == "__main__":
    main()
    os._exit(0)
