from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.config import WorkerSettings
from services.worker.layout import RankLayout
from shared.config import load_settings
from shared.model_files.model_dir import WEIGHTS, ModelDirectoryError


def test_only_the_model_directory_has_no_default() -> None:
    settings = load_settings(WorkerSettings, ["--model-dir=/m"])
    assert settings.model_dir == Path("/m")
    assert (settings.ops_backend, settings.dtype, settings.kv_cache_memory_gib) == ("auto", "auto", None)
    assert (settings.kv_cache_num_blocks, settings.num_threads) == (None, None)
    assert (settings.layout, settings.leader, settings.silence_s) == (RankLayout(fits_any_place=True), None, 3.0)
    assert (settings.draft_proposer, settings.draft_model, settings.num_draft_tokens) == ("none", None, 4)


def test_a_flag_overrides_the_environment_which_overrides_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WORKER_MODEL_DIR", "/from-environment")
    monkeypatch.setenv("LOCKSTEP_WORKER_OPS_BACKEND", "reference")
    settings = load_settings(WorkerSettings, ["--model-dir=/from-flag"])
    assert (settings.model_dir, settings.ops_backend) == (Path("/from-flag"), "reference")


def test_the_layout_of_a_coupled_groups_leader_is_read_from_its_flags() -> None:
    flags = ("--dp-rank=1", "--dp-size=2", "--tp-rank=0", "--tp-size=3", "--ep", "--leader=unix:/l")
    settings = load_settings(WorkerSettings, ["--model-dir=/m", *flags])
    assert settings.layout == RankLayout(1, 2, 0, 3, has_expert_parallel=True)


def test_a_worker_that_names_no_dp_rank_fits_any_place() -> None:
    assert load_settings(WorkerSettings, ["--model-dir=/m"]).layout.fits_any_place
    assert not load_settings(WorkerSettings, ["--model-dir=/m", "--dp-rank=0"]).layout.fits_any_place


def test_uncoupled_ranks_need_no_partners() -> None:
    settings = load_settings(WorkerSettings, ["--model-dir=/m", "--dp-rank=1", "--dp-size=2"])
    assert settings.layout.is_alone


@pytest.mark.parametrize(
    "flags",
    [
        ["--dp-rank=1"],
        ["--tp-rank=2", "--tp-size=2", "--leader=unix:/l"],
        # A follower without a leader, or a leader that would follow.
        ["--tp-rank=1", "--tp-size=2"],
        ["--tp-rank=0", "--tp-size=2", "--leader=unix:/l"],
        ["--dp-rank=1", "--dp-size=2", "--ep"],
        ["--dp-rank=1", "--dp-size=2", "--leader=unix:/l"],
        # The first of several processes, without an address for collectives.
        ["--tp-size=2", "--insecure-bind=0.0.0.0:9"],
        ["--dp-rank=0", "--dp-size=2", "--ep", "--insecure-bind=[::]:9"],
        ["--meet-timeout-s=0"],
        # Drafts, which the plan of coupled ranks does not cover.
        ["--dp-rank=0", "--dp-size=2", "--ep", "--draft-proposer=ngram"],
        # A size without a place.
        ["--dp-size=2"],
        ["--tp-size=0"],
        ["--silence-s=0.5"],
        ["--fail-on-token=-1"],
    ],
)
def test_an_impossible_layout_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(WorkerSettings, ["--model-dir=/m", *flags])
    assert exit_info.value.code == 2


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "--model-dir (or LOCKSTEP_WORKER_MODEL_DIR)"),
        (["--model-dir=/m", "--ops-backend=cuda"], "--ops-backend"),
        # What `native` falls back to is no choice.
        (["--model-dir=/m", "--ops-backend=cpu"], "--ops-backend"),
        (["--model-dir=/m", "--dtype=float16"], "--dtype"),
        (["--model-dir=/m", "--load-format=gguf"], "--load-format"),
        (["--model-dir=/m", "--dummy-seed=-1"], "--dummy-seed"),
        (["--model-dir=/m", "--kv-cache-memory-gib=0"], "--kv-cache-memory-gib"),
        (["--model-dir=/m", "--kv-cache-memory-gib=inf"], "--kv-cache-memory-gib"),
        (["--model-dir=/m", "--kv-cache-num-blocks=0"], "--kv-cache-num-blocks"),
        (["--model-dir=/m", "--num-threads=0"], "--num-threads"),
        (["--model-dir=/m", "--draft-proposer=oracle"], "--draft-proposer"),
        (["--model-dir=/m", "--draft-proposer=model"], "--draft-model"),
        (["--model-dir=/m", "--draft-proposer=ngram", "--draft-model=/d"], "--draft-model"),
        (["--model-dir=/m", "--num-draft-tokens=0"], "--num-draft-tokens"),
        (["--model-dir=/m", "--num-draft-tokens=9"], "--num-draft-tokens"),
        (["--model-dir=/m", "--listen=0.0.0.0:50053"], "--listen"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(flags: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(WorkerSettings, flags)
    assert exit_info.value.code == 2
    assert name in capsys.readouterr().err


def test_only_weights_that_are_loaded_must_be_there(tmp_path: Path) -> None:
    flags = [f"--model-dir={tmp_path}", "--load-format=dummy"]
    load_settings(WorkerSettings, flags).check_weights()
    with pytest.raises(ModelDirectoryError, match=r"model\.safetensors: no such file; the directory has no weights"):
        load_settings(WorkerSettings, flags[:1]).check_weights()


def test_a_draft_models_weights_must_be_there_too(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    for directory in (model, draft):
        directory.mkdir()
    (model / WEIGHTS).touch()
    flags = [f"--model-dir={model}", f"--draft-model={draft}", "--draft-proposer=model"]
    with pytest.raises(ModelDirectoryError, match=f"{draft / WEIGHTS}: no such file"):
        load_settings(WorkerSettings, flags).check_weights()
    (draft / WEIGHTS).touch()
    load_settings(WorkerSettings, flags).check_weights()
