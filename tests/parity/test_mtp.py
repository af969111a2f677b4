"""Multi-token prediction (MTP) layers against transformers', and their bitwise exactness on `reference`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.protocol import CausalLM
from services.worker.ops import BACKEND_NAMES, load_ops
from shared.model_files.model_dir import CONFIG, ModelDirectoryError
from tests.support.models.mtp_logits import mtp_of, our_mtp_logits
from tests.support.models.paged_model import PagedModel
from tests.support.models.parity import LOGIT_TOLERANCE, make_prompts
from tests.support.models.small_mtp import WEIGHTS, SmallMtpModel, make_small_mtp_model

BLOCK_SIZE = 16
FAMILIES = (
    ("DeepseekV3ForCausalLM", "yarn-rope"),
    ("DeepseekV32ForCausalLM", "few-selected"),
    ("Glm4MoeForCausalLM", "query-key-norms"),
    ("Glm4MoeLiteForCausalLM", "plain"),
    ("GlmMoeDsaForCausalLM", "no-shared-indexer"),
    ("Qwen3NextForCausalLM", "plain"),
    ("Qwen3_5ForCausalLM", "wide-heads-tied"),
    ("Qwen3_5MoeForCausalLM", "plain"),
)
PROMPT = make_prompts([70])[0]


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallMtpModel:
    architecture, variant = request.param
    num_layers = 1 if architecture.startswith("Qwen") else 2
    return make(architecture, variant, tmp_path_factory.mktemp("mtp"), num_mtp_layers=num_layers)


def test_the_layers_are_left_out_of_the_digest_that_a_cell_compares(small: SmallMtpModel) -> None:
    ops = load_ops("reference")
    with_mtp, without = (
        load_model(small.directory, ops, torch.float32, lambda _: None, options=LoadOptions(with_mtp=each))
        for each in (True, False)
    )
    assert with_mtp.weights_digest != without.weights_digest
    assert with_mtp.facts.weights_digest == without.facts.weights_digest == without.weights_digest


def load(model_dir: Path, backend: str, *, with_mtp: bool = True) -> CausalLM:
    options = LoadOptions(with_mtp=with_mtp)
    return load_model(model_dir, load_ops(backend), torch.float32, lambda _: None, options=options).model


def load_paged(model_dir: Path, backend: str) -> PagedModel:
    return PagedModel(load(model_dir, backend), load_ops(backend), num_blocks=32, block_size=BLOCK_SIZE)


def make(architecture: str, variant: str, directory: Path, *, num_mtp_layers: int) -> SmallMtpModel:
    return make_small_mtp_model(architecture, variant, directory, num_mtp_layers=num_mtp_layers)


def make_deepseek(directory: Path) -> SmallMtpModel:
    return make("DeepseekV3ForCausalLM", "plain", directory, num_mtp_layers=1)


def read_config(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return values


def change_config(directory: Path, **changes: object) -> None:
    (directory / CONFIG).write_text(json.dumps({**read_config(directory), **changes}), encoding="utf-8")


def remove_tensors(directory: Path, part: str) -> None:
    tensors = {name: value for name, value in load_file(directory / WEIGHTS).items() if part not in name}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def their_mtp_logits(small: SmallMtpModel, token_ids: Sequence[int]) -> list[Tensor]:
    """Per layer k the logits [num_tokens - 1 - k, vocabulary] after each token, for the token k + 2 positions later.

    Source: arXiv:2412.19437, equations 21 to 23, and transformers' `MtpLayer`.
    """
    ids, base = torch.tensor([token_ids]), small.model.model
    hidden = base(ids, use_cache=False).last_hidden_state
    logits = []
    for number, layer in enumerate(small.layers, start=1):
        places = torch.arange(len(token_ids) - number)[None]
        hidden = layer(
            base.embed_tokens(ids[:, number:]),
            hidden[:, :-1],
            position_embeddings=base.rotary_emb(hidden, places),
            attention_mask=torch.full((places.shape[1],) * 2, -torch.inf).triu(1)[None, None],
            position_ids=places,
            past_key_values=None,
        )
        logits.append(small.model.lm_head(hidden)[0])
    return logits


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_layers_predict_what_those_of_transformers_do(small: SmallMtpModel, backend: str) -> None:
    expected, paged = their_mtp_logits(small, PROMPT), load_paged(small.directory, backend)
    # On `reference` chunks give the same bits: the next test.
    for chunk_size in (len(PROMPT), 23, 1)[: 1 if backend == "reference" else None]:
        for ours, wanted in zip(our_mtp_logits(paged, PROMPT, chunk_size), expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=LOGIT_TOLERANCE * float(wanted.abs().max()), rtol=0)


def test_reference_gives_the_same_bits_in_chunks_of_any_size(small: SmallMtpModel) -> None:
    paged = load_paged(small.directory, "reference")
    whole = our_mtp_logits(paged, PROMPT, len(PROMPT))
    for chunk_size in (23, 1):
        assert all(map(torch.equal, our_mtp_logits(paged, PROMPT, chunk_size), whole))


def test_the_model_computes_the_same_with_such_layers_and_without(tmp_path: Path) -> None:
    make_deepseek(tmp_path)
    with_mtp, without = (load(tmp_path, "reference", with_mtp=flag) for flag in (True, False))
    assert (mtp_of(with_mtp).num_layers, without.mtp) == (1, None)
    assert len(with_mtp.kv_cache_spec.layers) == len(without.kv_cache_spec.layers) + 1
    first, second = (PagedModel(model, load_ops("reference"), num_blocks=32) for model in (with_mtp, without))
    assert torch.equal(first.prefill_all(first.add(PROMPT)), second.prefill_all(second.add(PROMPT)))


def test_a_checkpoint_that_only_names_such_layers_has_none(tmp_path: Path) -> None:
    make_deepseek(tmp_path)
    remove_tensors(tmp_path, ".layers.2.")
    assert load(tmp_path, "cpu").mtp is None


def test_a_layer_that_config_json_does_not_name_has_no_place(tmp_path: Path) -> None:
    make_deepseek(tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelDirectoryError, match=r"model\.layers\.2\."):
        load(tmp_path, "cpu")


def test_the_layer_of_qwen_is_refused_if_it_is_not_the_one_published(tmp_path: Path) -> None:
    make("Qwen3_5ForCausalLM", "plain", tmp_path, num_mtp_layers=1)
    for name, value in (("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)):
        change_config(tmp_path, **{name: value})
        assert load(tmp_path, "cpu", with_mtp=False).mtp is None
        with pytest.raises(ModelDirectoryError, match=r"2 prediction layers|mtp_use_dedicated_embeddings is True"):
            load(tmp_path, "cpu")
        change_config(tmp_path, **{name: None})
    remove_tensors(tmp_path, "mtp.layers.0.self_attn.q_norm")
    with pytest.raises(ModelDirectoryError, match=r"mtp\.layers\.0\.self_attn\.q_norm\.weight"):
        load(tmp_path, "cpu")
    remove_tensors(tmp_path, "mtp.")
    assert load(tmp_path, "cpu").mtp is None


@pytest.mark.parametrize("name", ["enorm", "shared_head.norm", "self_attn.kv_b_proj"])
def test_a_layer_that_lacks_a_tensor_is_refused_when_it_is_asked_for(tmp_path: Path, name: str) -> None:
    make_deepseek(tmp_path)
    remove_tensors(tmp_path, f".layers.2.{name}.")
    assert load(tmp_path, "cpu", with_mtp=False).mtp is None
    with pytest.raises(ModelDirectoryError, match=rf"model\.layers\.2\.{name}\.weight"):
        load(tmp_path, "cpu")
