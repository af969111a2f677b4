"""Chains of drafts: the same for each row as alone, and computed without the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.batch.device_batch import DeviceBatch
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput
from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import ComputedTokens, Drafter, DraftProposer
from services.worker.drafts.greedy_drafts import DraftChain
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.forward.kv_cache import KvCache, KvCacheSpec
from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.registry import CausalLM
from services.worker.ops import Ops, load_ops
from services.worker.weights.dummy_weights import DummyWeights
from tests.support.kernels.meta_device import META, AnsweredReads, WithoutWaiting, skip_kernels
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_llama import TINY_CONFIG
from tests.support.worker.worker_steps import column, decode_step, make_enter, prefill_step

VOCABULARY = 7
LIMITS = BatchLimits(
    max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=64, context_length=512, logits_width=512
)
MOST_DRAFTS = 4
DEEPSEEK = {
    **SMALL_CONFIGS["DeepseekV32ForCausalLM"]["plain"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 4,
    "num_nextn_predict_layers": 2,
}
# The drafts share what the first one selected.
GLM = {
    **SMALL_CONFIGS["GlmMoeDsaForCausalLM"]["plain"],
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_topk": 4,
    "num_nextn_predict_layers": 1,
}


def next_state(states: Tensor, token_ids: Tensor, num_drafted: int) -> Tensor:
    """A toy layer; states are integers."""
    return (states * 3 + token_ids[:, None] + num_drafted) % 101


def toy_logits(states: Tensor) -> Tensor:
    """Some logits of each state; there are ties."""
    return ((states * torch.arange(1, VOCABULARY + 1)) % 5).float()


def drafts_alone(state: int, count: int) -> list[int]:
    """The drafts of one row."""
    drafts: list[int] = []
    states = torch.tensor([[state]])
    for num_drafted in range(1, count + 1):
        token_ids = toy_logits(states).argmax(-1)
        drafts += token_ids.tolist()
        states = next_state(states, token_ids, num_drafted)
    return drafts


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), min_size=1, max_size=6))
def test_a_chain_gives_each_row_its_drafts_and_computes_none_in_vain(rows: list[tuple[int, int]]) -> None:
    counts = [count for count, _ in rows]
    chain = DraftChain.make(column(counts))
    num_computed: list[int] = []

    def advance(token_ids: Tensor, hidden: Tensor, num_drafted: int) -> Tensor:
        assert len(token_ids) == len(hidden)
        num_computed.append(len(hidden))
        return next_state(hidden, token_ids, num_drafted)

    assert len(chain.arrays()["by_row"]) == sum(counts)
    if not sum(counts):
        return
    first = torch.tensor([[rows[row][1]] for row in chain.drafting.tolist()]).reshape(-1, 1)
    drafts = chain.draft(first, compute_logits=toy_logits, ops=load_ops("reference"), advance=advance)
    by_row = drafts[torch.from_numpy(chain.arrays()["by_row"])]
    assert by_row.tolist() == [token for count, state in rows for token in drafts_alone(state, count)]
    assert num_computed == [sum(count > place for count in counts) for place in range(1, max(counts))]


def load_on_meta(config: dict[str, Any], directory: Path, ops: Ops, *, with_mtp: bool) -> CausalLM:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = LoadOptions(with_mtp=with_mtp, dummy_seed=1, device=META)
    return load_model(directory, ops, torch.bfloat16, lambda _: None, options=options).model


@pytest.fixture(params=["draft model", "mtp", "mtp, shared selection"])
def proposer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DraftProposer:
    """On a device without values."""
    skip_kernels(monkeypatch)
    ops = load_ops("triton")
    if request.param == "draft model":
        made: DraftProposer = DraftModelProposer(load_on_meta(TINY_CONFIG, tmp_path, ops, with_mtp=False), ops)
        made.attach(LIMITS, KvCache(KvCacheSpec(()), LIMITS.num_blocks, LIMITS.block_size, META))
        return made
    # Dummy weights have no such layers otherwise.
    monkeypatch.setattr(DummyWeights, "__contains__", lambda _, name: name.endswith("eh_proj.weight"))
    config = DEEPSEEK if request.param == "mtp" else GLM
    model = load_on_meta(config, tmp_path, ops, with_mtp=True)
    assert model.mtp is not None
    assert model.mtp.num_layers == config["num_nextn_predict_layers"]
    made = MtpProposer(model.mtp, ops)
    made.attach(LIMITS, KvCache(model.kv_cache_spec, LIMITS.num_blocks, LIMITS.block_size, META))
    return made


def finish(batch: InputBatch, proposer: DraftProposer, step_input: StepInput) -> None:
    """End a step whose drafts were all right."""
    draft_counts = step_input.draft_counts
    counts = None if draft_counts is None else (draft_counts + 1).astype(np.int32)
    num_drawn = len(step_input.row_slots) if counts is None else int(counts.sum())
    token_ids = np.ones(num_drawn, np.int32)
    note = proposer.observe(step_input)
    if note is not None:
        hidden = torch.empty(step_input.num_tokens, TINY_CONFIG["hidden_size"], dtype=torch.bfloat16, device=META)
        drawn = torch.empty(num_drawn, dtype=torch.int64, device=META)
        device_counts = None if counts is None else torch.empty(len(counts), dtype=torch.int64, device=META)
        note(ComputedTokens(hidden, drawn, device_counts))
    batch.record_sampled(step_input.row_slots, token_ids, counts, draft_counts)


@torch.inference_mode()
def test_the_host_waits_for_no_draft(proposer: DraftProposer) -> None:
    batch = InputBatch(LIMITS, drafter=Drafter(proposer, MOST_DRAFTS))
    # The last one's limit leaves room for 1 draft at first, and then for none.
    enters = [
        make_enter(slot, [5, 9, 2], range(8 * slot, 8 * slot + 8), max_num_tokens=28 - 11 * slot) for slot in (0, 1)
    ]
    enters.append(make_enter(4, [7], range(32, 40), max_num_tokens=4))
    columns = DeviceBatch(load_ops("triton"), LIMITS, META).columns
    with WithoutWaiting(), AnsweredReads() as reads:  # type: ignore[no-untyped-call]
        finish(batch, proposer, batch.apply(prefill_step(*enters)))
        assert reads.shapes == []
        num_drafts = []
        for _ in range(4):
            step_input = batch.apply(decode_step())
            assert step_input.draft_counts is not None
            assert step_input.device_drafts is not None
            num_drafts.append(step_input.draft_counts.tolist())
            assert step_input.device_drafts.compute(columns).shape == (sum(num_drafts[-1]),)
            finish(batch, proposer, step_input)
    assert reads.shapes == []
    assert num_drafts[:2] == [[2, 2, 1], [4, 4]]
