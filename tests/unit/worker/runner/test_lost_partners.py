"""A step whose collective a lost partner breaks off: one line in the log, and no traceback of what is no bug here."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.worker.layout import RankLayout
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.parallel.communicator import Parallel
from services.worker.parallel.rendezvous import PartnerLostError
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from shared.errors import InternalError
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.ranks.spread_experts import ep_layouts
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.worker.worker_steps import decode_step, make_enter, prefill_step


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = {**SMALL_CONFIGS["MixtralForCausalLM"]["window"], "architectures": ["MixtralForCausalLM"]}
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    return directory


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "layouts",
    [[RankLayout(tp_rank=rank, tp_size=2) for rank in range(2)], ep_layouts(2, 1), ep_layouts(2, 2)],
    ids=["tp", "coupled", "both"],
)
def test_a_step_that_a_lost_partner_breaks_off_is_one_warning(
    layouts: list[RankLayout], backend: str, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_coupled = layouts[0].is_coupled
    across = (5, 5) if is_coupled else ()

    def run(parallel: Parallel) -> str:
        ops, options = load_ops(backend), LoadOptions(dummy_seed=1)
        loaded = load_model(model_dir, ops, torch.float32, lambda _: None, options=options, parallel=parallel)
        runner = ModelRunner(loaded, ops, KvCacheSize(0, num_blocks=32), layout=parallel.layout)
        runner.attach(block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
        prefill = prefill_step(make_enter(0, [5, 9, 2, 44, 17], range(8)))
        assert len(runner.run_step(replace(prefill, num_tokens_across_dp=across)).token_ids) == 1
        if parallel.layout == layouts[-1]:
            # Its connections are closed with the last reference.
            return "left"
        with pytest.raises(InternalError) as raised:
            runner.run_step(replace(decode_step(), num_tokens_across_dp=(1, 1) if is_coupled else ()))
        return type(raised.value.__cause__).__name__

    with caplog.at_level(logging.WARNING):
        ends = run_ranks(layouts, run, is_exact=backend == "reference")
    assert ends == [PartnerLostError.__name__] * (len(layouts) - 1) + ["left"]
    records = [(record.levelname, record.message, record.exc_info) for record in caplog.records]
    assert records == [("WARNING", "step broken off", None)] * (len(layouts) - 1)
