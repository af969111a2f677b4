"""Models from files of packed weights: bit by bit those that are loaded from their own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import Ops, load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import SINGLE, Parallel
from services.worker.weights.gguf_import.conversion import convert
from shared.model_files.packed_files import PackedCache
from tests.support.models.gguf_files import CONFIG, write_gguf
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.small_mtp import make_small_mtp_model
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks

# Rows of whole blocks of 256.
WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PROMPT = [5, 9, 30, 4, 77]


class Loads:
    """Loads of one model, with a cache of its own."""

    def __init__(self, model_dir: Path, cache: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model_dir = model_dir
        self.cache = cache
        self.packed = PackedCache(cache, 1 << 30)
        self.dtype = dtype
        self.options = options

    def load(self, packed: PackedCache | None, parallel: Parallel = SINGLE) -> tuple[LoadedModel, Ops]:
        ops = load_ops("native")
        assert ops.packing is not None, "the kernels cannot be built here"
        options = LoadOptions(packed=packed, **self.options)
        loaded = load_model(self.model_dir, ops, self.dtype, lambda _: None, options=options, parallel=parallel)
        return loaded, ops

    def files(self) -> list[Path]:
        return sorted(self.cache.iterdir())

    def results(self, packed: PackedCache | None, parallel: Parallel = SINGLE) -> tuple[Tensor, object]:
        """Logits, and all that a worker says of the model."""
        loaded, ops = self.load(packed, parallel)
        paged = PagedModel(loaded.model, ops, num_blocks=8)
        logits = paged.prefill_all(paged.add(PROMPT))
        return logits, (loaded.facts, loaded.weights_digest, loaded.packed_formats)

    def check(self, caplog: pytest.LogCaptureFixture) -> None:
        """Load without a cache, then twice with it: all give the same bits, and only the last one reads the file."""
        caplog.clear()
        plain, facts = self.results(None)
        assert "packed weights" not in caplog.text
        for message in ("packed weights are kept in a file", "packed weights are read from a file"):
            caplog.clear()
            logits, same_facts = self.results(self.packed)
            assert message in caplog.text
            assert torch.equal(logits, plain)
            assert same_facts == facts


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


# Each reads or joins its weights in a way of its own.
FAST = ("DeepseekV32ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "Qwen3NextForCausalLM")


def every_variant() -> list[Any]:
    """All small models: `make test` loads some, `make test-slow` one per architecture, `make proofs` the others."""
    ordinary: Mapping[str, Any] = dict.fromkeys(FAST, ())
    return [
        pytest.param(
            architecture, variant, marks=pytest.mark.proof if number else ordinary.get(architecture, pytest.mark.slow)
        )
        for architecture in ARCHITECTURES
        for number, variant in enumerate(SMALL_CONFIGS[architecture])
    ]


@pytest.mark.parametrize(("architecture", "variant"), every_variant())
def test_every_architecture_is_the_same_from_packed_weights(
    tmp_path: Path, architecture: str, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = write_small_model(build_model(architecture, SMALL_CONFIGS[architecture][variant]), tmp_path / "model")
    Loads(model_dir, tmp_path / "cache", quantization=MatrixFormat.INT8).check(caplog)


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": False, "attention_bias": True, "intermediate_size": 160}
    return write_tiny_llama(tmp_path_factory.mktemp("plain"), changes=changes)


@pytest.mark.parametrize("scheme", [*SCHEMES, *PUBLISHED])
def test_every_format_is_the_same_from_packed_weights(
    plain_dir: Path, tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = write_quantized(plain_dir, tmp_path / "model", {**SCHEMES, **PUBLISHED}[scheme])
    Loads(quantized, tmp_path / "cache").check(caplog)


def test_weights_of_a_file_are_in_private_memory_since_shared_has_no_huge_pages(
    plain_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def num_shared() -> int:
        """How many parts of this process's memory are shared and have no file."""
        return Path("/proc/self/maps").read_text(encoding="utf-8").count(" /dev/zero")

    loads = Loads(plain_dir, tmp_path / "cache")
    before = num_shared()
    loaded = [loads.load(loads.packed) for _ in range(2)]
    assert "packed weights are read from a file" in caplog.text
    assert num_shared() == before
    del loaded


@pytest.mark.parametrize("quantization", [None, MatrixFormat.INT8, MatrixFormat.INT4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_quantised_at_load_is_the_same_from_packed_weights(
    plain_dir: Path,
    tmp_path: Path,
    quantization: MatrixFormat | None,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Loads(plain_dir, tmp_path / "cache", dtype, quantization=quantization).check(caplog)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K, Kind.Q5_0, Kind.Q6_K, Kind.IQ4_NL, Kind.Q2_K])
def test_ggufs_blocks_are_the_same_from_packed_weights(
    tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", config=WIDE, kind=kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    Loads(tmp_path / "model", tmp_path / "cache").check(caplog)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
def test_layers_that_draft_have_a_file_of_their_own(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = make_small_mtp_model(architecture, "plain", tmp_path / "model", num_mtp_layers=1)
    for with_mtp in (True, False):
        Loads(small.directory, tmp_path / "cache", with_mtp=with_mtp).check(caplog)


@pytest.mark.parametrize("has_ep", [False, True])
def test_each_rank_has_a_file_and_all_read_or_none(
    tmp_path: Path, has_ep: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = SMALL_CONFIGS["MixtralForCausalLM"]["plain"]
    model_dir = write_small_model(build_model("MixtralForCausalLM", config), tmp_path / "model")
    loads = Loads(model_dir, tmp_path / "cache", quantization=MatrixFormat.INT8)
    layouts = [RankLayout(tp_rank=rank, tp_size=2, has_expert_parallel=has_ep) for rank in range(2)]

    def results(packed: PackedCache | None) -> list[object]:
        caplog.clear()
        found = run_ranks(layouts, lambda rank: loads.results(packed, rank), is_exact=False)
        return [(logits.tolist(), facts) for logits, facts in found]

    plain = results(None)
    assert results(loads.packed) == plain
    assert caplog.text.count("packed weights are kept in a file") == 2
    assert results(loads.packed) == plain
    assert caplog.text.count("packed weights are read from a file") == 2
    assert "kept in a file" not in caplog.text
    lost = loads.files()[0]
    lost.unlink()
    assert results(loads.packed) == plain
    # One rank has its file, but both load the model's.
    assert caplog.text.count("packed weights are kept in a file") == 1
    assert lost.exists()
