"""The draft proposer is loaded according to the settings, and refused if it does not fit the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.config import WorkerSettings
from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.layout import RankLayout
from services.worker.models.planning import plan_model
from services.worker.ops import load_ops
from services.worker.parallel.communicator import Parallel
from services.worker.runner.start.build import build_model_runner
from services.worker.runner.start.drafting import check_drafting, make_drafting
from services.worker.runner.start.plan_checks import check_plan
from shared.model_files.model_dir import TOKENIZER, ModelDirectoryError
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.worker.worker_runner import load_exact

SMALL = {"num_hidden_layers": 1, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 1})


def drafting_of(model_dir: Path, **settings: Any) -> Drafting | None:
    ops = load_ops("reference")
    all_settings = WorkerSettings(model_dir=model_dir, ops_backend="reference", **settings)
    plan = plan_model(model_dir, ops, torch.float32)
    check_plan(all_settings, plan)
    check_drafting(all_settings, plan, ops)
    return make_drafting(all_settings, load_exact(model_dir), ops, lambda: None)


def change_tokenizer(model_dir: Path, changes: Mapping[str, int]) -> None:
    """Change the ids of some tokens."""
    path = model_dir / TOKENIZER
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"].update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_drafting_is_off_by_default(model_dir: Path) -> None:
    assert drafting_of(model_dir) is None


def test_ngrams_need_no_files(model_dir: Path) -> None:
    drafting = drafting_of(model_dir, draft_proposer="ngram", num_draft_tokens=3)
    assert drafting is not None
    assert isinstance(drafting.proposer, NgramProposer)
    assert drafting.num_draft_tokens == 3


def test_a_draft_model_may_have_any_size_and_a_shorter_context(model_dir: Path, tmp_path: Path) -> None:
    draft_dir = write_tiny_llama(tmp_path / "draft", changes=SMALL, seed=2)
    drafting = drafting_of(model_dir, draft_proposer="model", draft_model=draft_dir)
    assert drafting is not None
    assert isinstance(drafting.proposer, DraftModelProposer)
    assert len(drafting.proposer.kv_cache_spec.layers) == 1


def test_a_tokenizer_with_another_formatting_is_the_same(model_dir: Path, tmp_path: Path) -> None:
    draft_dir = write_tiny_llama(tmp_path / "draft", changes=SMALL)
    path = draft_dir / TOKENIZER
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True), encoding="utf-8")
    assert drafting_of(model_dir, draft_proposer="model", draft_model=draft_dir) is not None


def test_a_model_with_another_vocabulary_size_cannot_draft(model_dir: Path, tmp_path: Path) -> None:
    draft_dir = write_tiny_llama(tmp_path / "draft", changes={**SMALL, "vocab_size": 500})
    with pytest.raises(ModelDirectoryError, match=f"{draft_dir} cannot draft for {model_dir}: .* 500 tokens, not 512"):
        drafting_of(model_dir, draft_proposer="model", draft_model=draft_dir)


def test_a_model_with_another_tokenizer_cannot_draft(model_dir: Path, tmp_path: Path) -> None:
    draft_dir = write_tiny_llama(tmp_path / "draft", changes=SMALL)
    vocabulary = json.loads((draft_dir / TOKENIZER).read_text(encoding="utf-8"))["model"]["vocab"]
    first, second = (next(text for text, token_id in vocabulary.items() if token_id == number) for number in (40, 41))
    change_tokenizer(draft_dir, {first: 41, second: 40})
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json differs; token 40 is"):
        drafting_of(model_dir, draft_proposer="model", draft_model=draft_dir)


def test_a_vocabulary_may_be_a_list_of_pieces_with_scores(tmp_path: Path) -> None:
    dirs = [write_tiny_llama(tmp_path / name, changes=SMALL) for name in ("model", "draft", "other")]
    for directory, last in zip(dirs, ("c", "c", "d"), strict=True):
        content = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], [last, -3.0]]}}
        (directory / TOKENIZER).write_text(json.dumps(content), encoding="utf-8")
    assert drafting_of(dirs[0], draft_proposer="model", draft_model=dirs[1]) is not None
    with pytest.raises(ModelDirectoryError, match="token 2 is 'd', not 'c'"):
        drafting_of(dirs[0], draft_proposer="model", draft_model=dirs[2])


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [1]}}'])
def test_a_tokenizer_without_a_vocabulary_is_an_error(model_dir: Path, tmp_path: Path, content: str) -> None:
    draft_dir = write_tiny_llama(tmp_path / "draft", changes=SMALL)
    (draft_dir / TOKENIZER).write_text(content, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=str(draft_dir / TOKENIZER)):
        drafting_of(model_dir, draft_proposer="model", draft_model=draft_dir)


def test_ranks_with_different_draft_models_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """They would compute different drafts in the same step."""
    draft_dirs = [write_tiny_llama(tmp_path / f"draft{seed}", changes=SMALL, seed=seed) for seed in (2, 3)]
    loaded, ops = load_exact(model_dir), load_ops("reference")

    def problem(parallel: Parallel, *own_dirs: Path) -> str | None:
        settings = WorkerSettings(
            model_dir=model_dir, draft_proposer="model", draft_model=own_dirs[parallel.layout.tp_rank]
        )
        try:
            make_drafting(settings, loaded, ops, lambda: None, parallel=parallel)
        except ModelDirectoryError as error:
            return str(error)
        return None

    layouts = [RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)]
    assert run_ranks(layouts, lambda rank: problem(rank, draft_dirs[0], draft_dirs[0])) == [None, None]
    problems = run_ranks(layouts, lambda rank: problem(rank, *draft_dirs))
    assert problems == [f"{each}: tensor model.embed_tokens.weight is not the same on all ranks" for each in draft_dirs]


def test_mtp_is_refused_without_layers_for_it(model_dir: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=f"{model_dir}: no layers for multi-token prediction"):
        drafting_of(model_dir, draft_proposer="mtp")


def test_a_signal_ends_the_loading_of_a_draft_model(model_dir: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    parts: list[float] = []

    def on_progress(part: float) -> None:
        if parts and parts[-1] == part == 1.0:
            raise StopError
        parts.append(part)

    draft_dir = write_tiny_llama(tmp_path / "draft", changes=SMALL)
    settings = WorkerSettings(model_dir=model_dir, draft_proposer="model", draft_model=draft_dir, num_threads=1)
    with pytest.raises(StopError):
        build_model_runner(settings, on_progress)


def test_dummy_models_draft_without_a_tokenizer(model_dir: Path, tmp_path: Path) -> None:
    dirs = []
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((model_dir / "config.json").read_bytes())
        dirs.append(tmp_path / name)
    settings = WorkerSettings(
        model_dir=dirs[0], draft_proposer="model", draft_model=dirs[1], load_format="dummy", num_threads=1
    )
    assert build_model_runner(settings, lambda _: None).num_draft_tokens == 4
