"""Drafts by a prediction layer with an indexer, which selects for each draft or once for all, as transformers' do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from services.worker.drafts.drafter import Drafting
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.ops import load_ops
from shared.model_files.model_dir import CONFIG, ModelDirectoryError
from tests.support.models.drafting import CheckedProposer, Oracle, num_accepted
from tests.support.models.mtp_logits import mtp_of
from tests.support.models.parity import make_prompts
from tests.support.models.small_mtp import MtpBlock, SmallMtpModel, make_small_mtp_model
from tests.support.worker.worker_driver import Request, WorkerDriver
from tests.support.worker.worker_runner import make_runner

FAMILY = "GlmMoeDsaForCausalLM"
# Some are shorter than what is selected, 24, for a few tokens or for good.
REQUESTS = [Request(prompt, 10) for prompt in make_prompts((40, 3, 18, 27), seed=2)]


def make(directory: Path, *, is_shared: bool, num_mtp_layers: int = 1, has_sure_drafts: bool = False) -> SmallMtpModel:
    small = make_small_mtp_model(
        FAMILY, "plain", directory, num_mtp_layers=num_mtp_layers, has_sure_drafts=has_sure_drafts
    )
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    assert config["index_share_for_mtp_iteration"]
    config["index_share_for_mtp_iteration"] = is_shared
    (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return small


def load(small: SmallMtpModel) -> LoadedModel:
    options = LoadOptions(with_mtp=True)
    return load_model(small.directory, load_ops("reference"), torch.float32, lambda _: None, options=options)


def run_layer(small: SmallMtpModel, layer: MtpLayer, hidden: Tensor, ids: Tensor, selected: Tensor | None) -> Tensor:
    """The layer's states [1, n, hidden] of `hidden` [1, n, hidden] and the next tokens; no cache.

    `selected` [most] is what all tokens attend to, instead of what the layer's indexer says.
    """
    base, places, attention = small.model.model, torch.arange(hidden.shape[1])[None], layer.mtp_block.layer.self_attn
    indexer = attention.indexer
    arguments = {}
    if selected is not None:
        attention.indexer = None
        arguments["prev_topk_indices"] = selected.expand(1, hidden.shape[1], -1)
    states: Tensor = layer(
        base.embed_tokens(ids),
        hidden,
        position_embeddings=base.rotary_emb(hidden, places),
        attention_mask=torch.full((places.shape[1],) * 2, -torch.inf).triu(1)[None, None],
        position_ids=places,
        past_key_values=None,
        **arguments,
    )
    attention.indexer = indexer
    return states


@torch.no_grad()
def their_drafts(small: SmallMtpModel, token_ids: list[int], count: int, *, is_shared: bool) -> list[int]:
    """The greedy drafts after `token_ids`, each computed from scratch."""
    (layer,), ids, drafts = small.layers, torch.tensor([token_ids]), list[int]()
    assert isinstance(layer.mtp_block, MtpBlock)
    hidden, selected = small.model.model(ids[:, :-1], use_cache=False).last_hidden_state, None
    for _ in range(count):
        states = run_layer(small, layer, hidden, ids[:, 1:], selected)
        if is_shared and selected is None:
            assert layer.mtp_block.selected is not None
            selected = layer.mtp_block.selected[0, -1]
        drafts.append(int(small.model.lm_head(states[0, -1]).argmax()))
        ids, hidden = torch.cat((ids, torch.tensor([drafts[-1:]])), 1), torch.cat((hidden, states[:, -1:]), 1)
    return drafts


def generate(small: SmallMtpModel, oracle: Oracle) -> WorkerDriver:
    """Answer the requests with drafts, all of which must be the oracle's."""
    loaded = load(small)
    proposer = CheckedProposer(MtpProposer(mtp_of(loaded.model), load_ops("reference")), oracle)
    drafting = Drafting(proposer, 4)
    driver = WorkerDriver(make_runner(loaded, num_blocks=200, drafting=drafting), seed=1, max_chunk=7)
    assert driver.generate(REQUESTS) == WorkerDriver(make_runner(loaded, num_blocks=200)).generate(REQUESTS)
    return driver


@pytest.mark.parametrize("is_shared", [True, False])
def test_later_drafts_attend_to_what_the_first_one_selected_if_the_model_says_so(
    tmp_path: Path, is_shared: bool
) -> None:
    small, num_different = make(tmp_path, is_shared=is_shared), 0

    def expected(token_ids: list[int], count: int) -> list[int]:
        nonlocal num_different
        drafts, others = (their_drafts(small, token_ids, count, is_shared=each) for each in (is_shared, not is_shared))
        num_different += drafts != others
        return drafts

    generate(small, expected)
    assert num_different


def test_so_they_do_after_accepted_drafts(tmp_path: Path) -> None:
    small = make(tmp_path, is_shared=True, has_sure_drafts=True)
    driver = generate(small, lambda token_ids, count: their_drafts(small, token_ids, count, is_shared=True))
    assert num_accepted(driver) > 5


def test_several_prediction_layers_do_not_share_what_they_select(tmp_path: Path) -> None:
    small = make(tmp_path, is_shared=True, num_mtp_layers=2)
    with pytest.raises(ModelDirectoryError, match="index_share_for_mtp_iteration is not supported with 2"):
        load(small)
