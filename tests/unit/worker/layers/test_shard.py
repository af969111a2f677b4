"""A rank's share of a model: its part of each dimension, what it reads of that, and what cannot be split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.forward.kv_cache import attention_cache
from services.worker.layers.embedding import Embedding, Head
from services.worker.layers.linear import Linear, sum_over_ranks
from services.worker.layers.shard import Part, Shard
from services.worker.layout import RankLayout
from services.worker.models.loader import load_model
from services.worker.models.registry import CausalLM, loader_for
from services.worker.ops import Matrix, load_ops
from services.worker.parallel.communicator import SINGLE, Parallel
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.dummy_weights import DummyWeights
from services.worker.weights.model_weights import ALL
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.tiny_llama import TINY_CONFIG, write_tiny_llama
from tests.support.ranks.thread_ranks import run_ranks

OPS = load_ops("reference")


def layouts(size: int, *, has_expert_parallel: bool = False) -> list[RankLayout]:
    """The ranks of one TP group."""
    return [RankLayout(tp_rank=rank, tp_size=size, has_expert_parallel=has_expert_parallel) for rank in range(size)]


def shard_of(rank: Parallel) -> Shard:
    return Shard(OPS, DummyWeights(1, torch.float32), rank)


def shards(size: int) -> list[Shard]:
    return run_ranks(layouts(size), shard_of)


def kv_parts(size: int, num_kv_heads: int) -> list[Part]:
    return [shard.kv_heads(num_kv_heads) for shard in shards(size)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_parts_are_contiguous_and_the_first_ones_have_one_more() -> None:
    expected = [Part(11, 0, 4), Part(11, 4, 8), Part(11, 8, 11)]
    for rank, shard in enumerate(shards(3)):
        assert shard.parts("vocab_size", 11) == expected
        assert shard.part("vocab_size", 11) == expected[rank]
    assert (len(expected[2]), expected[2].run, expected[2].times(5)) == (3, slice(8, 11), Part(55, 40, 55))
    assert Part.whole(11) == Part(11, 0, 11)


def test_key_value_heads_match_a_ranks_query_heads() -> None:
    assert kv_parts(3, 9) == [Part(9, 0, 3), Part(9, 3, 6), Part(9, 6, 9)]
    assert kv_parts(4, 2) == [Part(2, 0, 1), Part(2, 0, 1), Part(2, 1, 2), Part(2, 1, 2)]
    assert kv_parts(3, 1) == [Part(1, 0, 1)] * 3
    for rank, shard in enumerate(shards(6)):
        # Query head h reads key/value head h // (H / K).
        query, kv = shard.heads(12), shard.kv_heads(3)
        assert {head // 4 for head in range(query.start, query.stop)} == {kv.start} == {rank // 2}


def build(changes: Mapping[str, Any], shard: Shard) -> CausalLM:
    config = {**TINY_CONFIG, **changes}
    return loader_for(config)(config, shard)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "num_attention_heads 4 is not a multiple of 3 tensor-parallel ranks"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "num_key_value_heads 3 is neither a multiple nor a divisor of 2",
        ),
        (
            6,
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            "num_key_value_heads 4 is neither a multiple nor a divisor of 6",
        ),
        (4, {"intermediate_size": 3}, "intermediate_size 3 cannot be split over 4 tensor-parallel ranks"),
        (4, {"vocab_size": 3}, "vocab_size 3 cannot be split over 4 tensor-parallel ranks"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_its_numbers(
    size: int, changes: Mapping[str, Any], message: str
) -> None:
    for shard in shards(size):
        with pytest.raises(ModelDirectoryError, match=f"config.json: {message}"):
            build(changes, shard)


def test_the_cache_holds_only_a_ranks_own_heads() -> None:
    for size, num_heads in ((1, 2), (2, 1), (4, 1)):
        for shard in shards(size):
            assert build({}, shard).kv_cache_spec.layers == (attention_cache(num_heads, 16, torch.float32),) * 4


class CountingWeights(DummyWeights):
    """Counts the values that are read."""

    def __init__(self) -> None:
        super().__init__(1, torch.float32)
        self.num_values = 0

    def read(self, name: str, shape: tuple[int, ...], *, rows: slice = ALL, dtype: torch.dtype | None = None) -> Tensor:
        values = super().read(name, shape, rows=rows, dtype=dtype)
        self.num_values += values.numel()
        return values

    def linear(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        matrix = super().linear(name, shape, rows=rows, columns=columns)
        self.num_values += prod(matrix.shape)
        return matrix

    def embedding(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        matrix = super().embedding(name, shape, rows=rows)
        self.num_values += prod(matrix.shape)
        return matrix

    def head(self, name: str, shape: tuple[int, int], *, rows: slice = ALL) -> Matrix:
        matrix = super().head(name, shape, rows=rows)
        self.num_values += prod(matrix.shape)
        return matrix


def test_a_rank_reads_its_share_and_the_norms() -> None:
    changes = {"attention_bias": True, "tie_word_embeddings": False}

    def count(rank: Parallel) -> int:
        weights = CountingWeights()
        build(changes, Shard(OPS, weights, rank))
        return weights.num_values

    # 9 norms, and the biases of the 4 output projections.
    num_common = (9 + 4) * 64
    (whole,), halves = run_ranks(layouts(1), count), run_ranks(layouts(2), count)
    assert [half - num_common for half in halves] == [(whole - num_common) // 2] * 2


def digest_of(model_dir: Path, rank: Parallel) -> str:
    return load_model(model_dir, OPS, torch.float32, lambda _: None, parallel=rank).weights_digest


def test_every_rank_has_the_digest_of_the_whole_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    assert len({digest for size in (1, 2, 4) for digest in run_ranks(layouts(size), partial(digest_of, tmp_path))}) == 1


def test_ranks_that_read_different_weights_refuse_them_by_name(tmp_path: Path) -> None:
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
        write_tiny_llama(directory)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(directories[1] / "model.safetensors")
    # In the rows of rank 0, which reads the other file.
    tensors[name][0, 0] += 1
    save_file(tensors, directories[1] / "model.safetensors", metadata={"format": "pt"})

    def check(rank: Parallel) -> None:
        directory = directories[rank.tp.rank]
        with pytest.raises(ModelDirectoryError, match=f"^{directory}: tensor {name} is not the same on all ranks$"):
            digest_of(directory, rank)

    run_ranks(layouts(2), check)


def test_a_rank_finds_errors_in_tensors_that_others_hold(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **TINY_CONFIG,
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {
        name: value
        for name, value in tensors.items()
        if "layers" not in name or ("layers.0" in name and "mlp" not in name)
    }
    prefix = "model.layers.0.block_sparse_moe"
    kept[f"{prefix}.gate.weight"] = random(4, 64)
    for expert in range(4):
        kept |= {f"{prefix}.experts.{expert}.{name}.weight": random(144, 64) for name in ("w1", "w3")}
        kept[f"{prefix}.experts.{expert}.w2.weight"] = random(64, 144)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    digests = run_ranks(layouts(2, has_expert_parallel=True), partial(digest_of, tmp_path))
    assert digests == [digest_of(tmp_path, SINGLE)] * 2
    del kept[f"{prefix}.experts.0.w2.weight"]
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def check(rank: Parallel) -> None:
        with pytest.raises(ModelDirectoryError, match=r"missing: .*experts\.0\.w2\.weight"):
            digest_of(tmp_path, rank)

    run_ranks(layouts(2, has_expert_parallel=True), check)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_products_of_all_ranks_add_up_to_the_whole(tmp_path: Path, size: int) -> None:
    """Up by outputs, fused and uneven; down by inputs, where the bias is added once."""
    tensors = {
        "q.weight": random(8, 5, seed=1),
        "q.bias": random(8, seed=2),
        "k.weight": random(7, 5, seed=3),
        "k.bias": random(7, seed=4),
        "down.weight": random(6, 8, seed=5),
        "down.bias": random(6, seed=6),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    x = random(4, 5, seed=7)

    def run(rank: Parallel) -> tuple[Tensor, Tensor]:
        with WeightFiles(tmp_path) as files:
            shard = Shard(OPS, CheckpointWeights(files, torch.float32), rank)
            query, key = shard.part("heads", 8), shard.part("heads", 7)
            up = Linear.load(shard, ["q", "k"], [query, key], inputs=Part.whole(5), has_bias=True)
            down = Linear.load(shard, ["down"], [Part.whole(6)], inputs=query, has_bias=True)
        projected = up(x)
        return projected, sum_over_ranks(down, rank.tp)(projected[:, : len(query)].contiguous())

    results = run_ranks(layouts(size), run)
    query, key = (x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in ("q", "k"))
    widths = [len(shard.part("heads", 8)) for shard in shards(size)]
    ours = [
        torch.split(up, [width, up.shape[1] - width], dim=1) for (up, _), width in zip(results, widths, strict=True)
    ]
    torch.testing.assert_close(torch.cat([part for part, _ in ours], dim=1), query)
    torch.testing.assert_close(torch.cat([part for _, part in ours], dim=1), key)
    for _, down in results:
        torch.testing.assert_close(down, query @ tensors["down.weight"].T + tensors["down.bias"])
        assert torch.equal(down, results[0][1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_has_all_vectors_and_all_logits(size: int) -> None:
    table, token_ids = random(11, 4), torch.tensor([0, 10, 3, 4, 7, 3])

    def run(rank: Parallel) -> tuple[Tensor, Tensor]:
        parts = shard_of(rank).parts("vocab_size", 11)
        part = parts[rank.tp.rank]
        embed, project = OPS.prepare_tied(table[part.run], torch.float32)
        embedding = Embedding(embed, part, rank.tp)
        before = token_ids.clone()
        vectors = embedding(token_ids)
        assert torch.equal(token_ids, before)
        return vectors, Head(project, parts, rank.tp)(vectors)

    for vectors, logits in run_ranks(layouts(size), run):
        assert torch.equal(vectors, table[token_ids])
        torch.testing.assert_close(logits, table[token_ids] @ table.T)
