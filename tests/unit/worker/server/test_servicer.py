"""A worker's service: what it reports, the steps it runs, and what it refuses."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import grpc
import pytest
from torch import Tensor
from typing_extensions import override

from lockstep.internal.v1 import worker_pb2
from lockstep.v1 import common_pb2
from services.worker.device import StepProposal, propose_steps
from services.worker.drafts.drafter import Drafting
from services.worker.drafts.ngram_drafts import LookupProposer, NgramProposer
from services.worker.models.loader import LoadedModel
from services.worker.runner.graphs.graph_runner import GraphSettings
from services.worker.runner.model_runner import Execution, ModelRunner
from services.worker.weights.sampling_defaults import SamplingDefaults
from shared.step.columns import Int32Column
from shared.wire import introduce_self, read_introduction
from tests.support.worker.graphs import CountingCapture
from tests.support.worker.worker_runner import WrappedModel, generate_alone, make_runner
from tests.support.worker.worker_service import (
    PROMPTS,
    Worker,
    attach_request,
    blocks_of,
    error_of,
    prefill_of,
    read,
    request,
    rest_of,
)
from tests.support.worker.worker_steps import column, decode_step, make_enter, pack, prefill_step, unpack


class RightProposer(LookupProposer):
    """Knows the model's completion of the first prompt."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._text = [*PROMPTS[0], *generate_alone(loaded, PROMPTS[0], 20)]

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        return column(self._text[len(token_ids) : len(token_ids) + max_tokens])


async def test_attach_reports_the_workers_facts(worker: Worker, loaded: LoadedModel) -> None:
    response = await worker.attach(7)
    runner = make_runner(loaded)
    assert response.model_digest == loaded.facts.model_digest
    assert response.context_length == loaded.facts.context_length
    assert response.logits_width == loaded.facts.logits_width
    assert tuple(response.eos_token_ids) == loaded.facts.eos_token_ids
    assert (response.num_blocks, response.ops_backend, response.last_step_id) == (64, "reference", 0)
    assert response.numerics_fingerprint == runner.numerics_fingerprint
    assert response.is_exact
    assert response.layout == worker_pb2.RankLayout(dp_rank=0, dp_size=1, tp_size=1)
    assert (response.is_stuck, response.last_step_epoch) == (False, 0)
    assert response.graph_batch_sizes == []
    assert read_introduction(response.introduction) == introduce_self()


async def test_attach_reports_the_graphs_that_were_captured(loading_worker: Worker, loaded: LoadedModel) -> None:
    graphs = GraphSettings(CountingCapture(), (16, 1, 4, 32))
    loading_worker.open(make_runner(loaded, execution=Execution(graphs)))
    assert (await loading_worker.attach(1, max_num_seqs=9)).graph_batch_sizes == [1, 4, 16]
    assert (await loading_worker.attach(2, max_num_seqs=3)).graph_batch_sizes == [1, 4]


async def test_attach_reports_the_drafting_capability(loading_worker: Worker, loaded: LoadedModel) -> None:
    loading_worker.open(make_runner(loaded))
    response = await loading_worker.attach(1)
    assert (response.num_draft_tokens, response.needs_all_tokens) == (0, False)
    loading_worker.open(make_runner(loaded, drafting=Drafting(NgramProposer(), 6)))
    response = await loading_worker.attach(2)
    assert (response.num_draft_tokens, response.needs_all_tokens) == (6, True)


async def test_a_cpu_worker_proposes_few_prompt_tokens_beside_all_decodes(worker: Worker) -> None:
    response = await worker.attach(1)
    assert (response.proposed_prompt_tokens, response.proposes_mixed_steps) == (512, True)
    assert propose_steps("cuda") == StepProposal(16384, mixes=False)


async def test_without_a_set_budget_a_step_may_have_the_proposed_tokens_and_one_per_sequence(
    loading_worker: Worker, loaded: LoadedModel
) -> None:
    runner = make_runner(loaded)
    runner.step_proposal = StepProposal(4, mixes=True)
    loading_worker.open(runner)
    claim = attach_request(1, max_num_seqs=3)
    claim.ClearField("max_num_batched_tokens")
    await loading_worker.stub.Attach(claim)
    fitting = prefill_step(make_enter(0, list(range(7)), blocks_of(0)), step_id=1)
    assert [len(tokens) for tokens in await loading_worker.run(fitting)] == [1]
    claim.epoch = 2
    await loading_worker.stub.Attach(claim)
    above = prefill_step(make_enter(0, list(range(8)), blocks_of(0)), step_id=1)
    code, reason, _ = await error_of(loading_worker.run(above, epoch=2))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_MISMATCH")


async def test_attach_reports_the_models_default_sampling(loading_worker: Worker, loaded: LoadedModel) -> None:
    loading_worker.open(make_runner(loaded))
    assert (await loading_worker.attach(1)).default_sampling == common_pb2.SamplingParams()
    defaults = SamplingDefaults(max_tokens=9, temperature=0.0, top_k=0, top_p=0.5, repetition_penalty=1.5)
    facts = replace(loaded.facts, sampling_defaults=defaults)
    loading_worker.open(make_runner(replace(loaded, facts=facts)))
    # Zeros are set explicitly.
    assert (await loading_worker.attach(2)).default_sampling == common_pb2.SamplingParams(
        max_tokens=9, temperature=0.0, top_k=0, top_p=0.5, repetition_penalty=1.5
    )


async def test_a_drafting_worker_generates_the_same_tokens_in_fewer_steps(
    loading_worker: Worker, loaded: LoadedModel
) -> None:
    loading_worker.open(make_runner(loaded, drafting=Drafting(RightProposer(loaded), 4)))
    await loading_worker.attach(1)
    call = await loading_worker.execute()
    for step in (prefill_of(PROMPTS[:1]), *(decode_step(step_id=step_id) for step_id in range(2, 5))):
        await call.write(request(step))
    await call.done_writing()
    results = await rest_of(call)
    assert [unpack(result.counts) if result.HasField("counts") else None for result in results] == [None, [3], [5], [5]]
    assert [result.num_draft_tokens for result in results] == [0, 2, 4, 4]
    tokens = [token_id for result in results for token_id in unpack(result.token_ids)]
    assert tokens == generate_alone(loaded, PROMPTS[0], 14)


async def test_a_loading_worker_is_not_ready(loading_worker: Worker) -> None:
    code, reason, _ = await error_of(loading_worker.attach(1))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, 2**32 - 1])
async def test_a_size_out_of_range_is_refused_and_claims_nothing(worker: Worker, name: str, value: int) -> None:
    code, reason, _ = await error_of(worker.attach(1, "one", **{name: value}))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    await worker.attach(1)


async def test_steps_generate_the_tokens_of_a_plain_loop_over_the_model(worker: Worker, loaded: LoadedModel) -> None:
    await worker.attach(1)
    tokens = await worker.run(prefill_of(), *(decode_step(step_id=step_id) for step_id in range(2, 9)))
    rows = [list(row) for row in zip(*tokens, strict=True)]
    assert rows == [generate_alone(loaded, prompt, 8) for prompt in PROMPTS]


async def test_results_arrive_in_the_order_of_steps_with_their_device_time(worker: Worker) -> None:
    await worker.attach(3)
    call = await worker.execute(3)
    for step in (prefill_of(), decode_step(step_id=2), decode_step(step_id=3)):
        await call.write(request(step, 3))
    results = [await read(call) for _ in range(3)]
    assert [(result.epoch, result.step_id) for result in results] == [(3, 1), (3, 2), (3, 3)]
    assert all(result.device_time_us > 0 for result in results)
    assert all(result.not_finite_rows == b"" for result in results)


async def test_a_stream_is_open_before_it_has_a_result(worker: Worker) -> None:
    await worker.attach(1)
    call = await worker.execute()
    assert (await call.read()).HasField("heartbeat")
    assert not call.done()


async def test_heartbeats_report_progress(worker: Worker) -> None:
    await worker.attach(4)
    call = await worker.execute(4)
    before = await call.read()
    assert (before.epoch, before.step_id, before.HasField("heartbeat")) == (4, 0, True)
    await call.write(request(prefill_of(), 4))
    assert (await read(call)).step_id == 1
    while not (after := await call.read()).HasField("heartbeat"):
        pass
    # At least one layer and the step.
    assert after.heartbeat.progress > before.heartbeat.progress


@pytest.mark.parametrize(("epoch", "scheduler"), [(1, "one"), (2, "two")])
async def test_a_heartbeat_of_another_epoch_or_scheduler_ends_the_stream(
    worker: Worker, epoch: int, scheduler: str
) -> None:
    await worker.attach(2, "one")
    call = await worker.execute(epoch, scheduler)
    _, reason, values = await error_of(read(call))
    # It has no stream yet, and so no live holder.
    assert (reason, values) == ("STALE_EPOCH", {"epoch": "2", "holder": ""})


async def test_a_stream_without_a_heartbeat_runs_no_steps(worker: Worker) -> None:
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(request(prefill_of()))
    _, reason, _ = await error_of(read(call))
    assert reason == "GROUP_HELD"
    await worker.run(prefill_of())


async def test_the_end_of_a_stream_without_steps_ends_the_epoch_too(worker: Worker) -> None:
    await worker.attach(1)
    assert await worker.run() == []
    _, reason, _ = await error_of(read(worker.stub.Execute()))
    assert reason == "STALE_EPOCH"


async def test_a_stream_without_a_claim_is_stale(worker: Worker) -> None:
    _, reason, _ = await error_of(read(worker.stub.Execute()))
    assert reason == "STALE_EPOCH"


@pytest.mark.parametrize("epoch", [0, 1, 3, 2**64 - 1])
async def test_a_step_of_another_epoch_is_stale(worker: Worker, epoch: int) -> None:
    await worker.attach(2)
    call = await worker.execute(2)
    await call.write(request(prefill_of(), epoch))
    _, reason, values = await error_of(read(call))
    assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")


@pytest.mark.parametrize("step_ids", [(0,), (2,), (1, 1), (1, 3), (1, 0)])
async def test_step_ids_count_from_one_without_gaps(worker: Worker, step_ids: tuple[int, ...]) -> None:
    await worker.attach(1)
    first, *others = step_ids
    steps = [prefill_of(step_id=first), *(decode_step(step_id=step_id) for step_id in others)]
    _, reason, _ = await error_of(worker.run(*steps))
    assert reason == "STEP_MISMATCH"


async def test_a_mismatch_is_reported_after_the_results_of_the_steps_before_it(worker: Worker) -> None:
    await worker.attach(1)
    call = await worker.execute()
    for step in (prefill_of(), decode_step(step_id=2), decode_step(step_id=9)):
        await call.write(request(step))
    assert [(await read(call)).step_id for _ in range(2)] == [1, 2]
    _, reason, _ = await error_of(read(call))
    assert reason == "STEP_MISMATCH"


HOSTILE = {
    "kind unset": {"kind": worker_pb2.STEP_KIND_UNSPECIFIED},
    "kind unknown": {"kind": 77},
    "half a number": {"leave_slots": b"\0\0\0\0\0"},
    "slot far out of range": {"leave_slots": pack([2**31 - 1])},
    "negative slot": {"decode_slots": pack([-1])},
    "block far out of range": {"append_slots": pack([0]), "append_block_ids": pack([2**31 - 1])},
    "negative block": {"append_slots": pack([0]), "append_block_ids": pack([-(2**31)])},
    "appends without blocks": {"append_slots": pack([0] * 1000)},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_columns_end_the_epoch_and_leave_the_worker_usable(
    worker: Worker, loaded: LoadedModel, changes: dict[str, Any]
) -> None:
    await worker.attach(1)
    fields: dict[str, Any] = {"epoch": 1, "step_id": 2, "kind": worker_pb2.STEP_KIND_DECODE} | changes
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await call.write(worker_pb2.StepRequest(**fields))
    await read(call)
    code, reason, _ = await error_of(read(call))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_MISMATCH")
    await worker.attach(2)
    assert await worker.run(prefill_of(), epoch=2) == [[generate_alone(loaded, prompt, 1)[0] for prompt in PROMPTS]]


class MineModel(WrappedModel):
    """Fails when it reads the last token of its vocabulary."""

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if bool((token_ids == self.logits_width - 1).any()):
            raise RuntimeError("secret: stepped on a mine")
        return super().forward(token_ids, positions)


async def test_a_failing_step_is_logged_and_reported_without_its_cause_and_the_worker_survives(
    loading_worker: Worker, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    mine = loaded.facts.logits_width - 1
    runner: ModelRunner = make_runner(replace(loaded, model=MineModel(loaded.model)))
    loading_worker.open(runner)
    await loading_worker.attach(1)
    call = await loading_worker.execute()
    # The second step is already queued for the device when the first one fails.
    for step in (prefill_of([[1, mine]]), decode_step(step_id=2)):
        await call.write(request(step))
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as error_info:
        await read(call)
    assert error_info.value.code() is grpc.StatusCode.INTERNAL
    assert "mine" not in str(error_info.value)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR and record.name != "asyncio"]
    assert [record.message for record in errors] == ["step failed"]
    assert "stepped on a mine" in caplog.text
    await loading_worker.attach(2)
    assert await loading_worker.run(prefill_of(), epoch=2) == [
        [generate_alone(loaded, prompt, 1)[0] for prompt in PROMPTS]
    ]
