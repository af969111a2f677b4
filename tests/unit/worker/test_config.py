from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.config import WorkerSettings
from shared.config import load_settings


def test_only_the_model_directory_has_no_default() -> None:
    settings = load_settings(WorkerSettings, ["--model-dir=/m"])
    assert settings.model_dir == Path("/m")
    assert (settings.ops_backend, settings.dtype, settings.kv_cache_memory_gib) == ("cpu", "float32", 1.0)
    assert (settings.kv_cache_num_blocks, settings.num_threads) == (None, None)
    assert (settings.draft_proposer, settings.draft_model, settings.num_draft_tokens) == ("none", None, 4)


def test_a_flag_goes_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WORKER_MODEL_DIR", "/from-environment")
    monkeypatch.setenv("LOCKSTEP_WORKER_OPS_BACKEND", "reference")
    settings = load_settings(WorkerSettings, ["--model-dir=/from-flag"])
    assert (settings.model_dir, settings.ops_backend) == (Path("/from-flag"), "reference")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "--model-dir (or LOCKSTEP_WORKER_MODEL_DIR)"),
        (["--model-dir=/m", "--ops-backend=cuda"], "--ops-backend"),
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
def test_a_wrong_setting_is_refused_by_its_name(
    flags: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(WorkerSettings, flags)
    assert exit_info.value.code == 2
    assert name in capsys.readouterr().err
