"""Attaching to a worker whose model has recurrent states."""

from __future__ import annotations

import logging

import grpc
import pytest

from lockstep.internal.v1 import worker_pb2
from services.worker.metrics import WorkerCollector
from services.worker.models.loader import LoadedModel
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from shared.process.metrics import make_process_registry
from shared.wire import introduce_self
from tests.support.models.small_models import build_small_model, write_small_model
from tests.support.worker.worker_runner import load_exact
from tests.support.worker.worker_service import Worker, attach_request


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = build_small_model("Qwen3NextForCausalLM", "layer-types-tied-biases")
    return load_exact(write_small_model(model, tmp_path_factory.mktemp("model")))


def introduced(epoch: int, max_num_seqs: int = 8) -> worker_pb2.AttachRequest:
    request = attach_request(epoch, max_num_seqs=max_num_seqs)
    request.MergeFrom(worker_pb2.AttachRequest(introduction=introduce_self().encode()))
    return request


async def test_attach_reports_states_and_for_how_many_sequences_there_is_room(
    loading_worker: Worker, recurrent: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    state_bytes = recurrent.model.state_spec.bytes_per_slot
    runner = ModelRunner(recurrent, load_ops("reference"), KvCacheSize(40 * state_bytes))
    loading_worker.open(runner)
    response = await loading_worker.stub.Attach(introduced(1, max_num_seqs=8))
    assert (response.state_bytes_per_slot, response.max_num_seqs) == (state_bytes, 8)
    assert response.num_blocks > 0
    assert "room for fewer sequences" not in caplog.text
    with caplog.at_level(logging.WARNING):
        capped = await loading_worker.stub.Attach(introduced(2, max_num_seqs=64))
    # Half of the memory, without the state of padding.
    assert capped.max_num_seqs == 19
    assert 0 < capped.num_blocks < response.num_blocks
    assert "room for fewer sequences" in caplog.text
    collector = WorkerCollector()
    collector.runner = runner
    registry = make_process_registry(collector, None)
    for kind, num_states in (("live", 20), ("checkpoint", capped.num_checkpoint_slots)):
        num_bytes = registry.get_sample_value("lockstep_state_cache_bytes", {"kind": kind})
        assert num_bytes == num_states * state_bytes, kind
    again = await loading_worker.stub.Attach(introduced(3, max_num_seqs=8))
    assert (again.num_blocks, again.max_num_seqs) == (response.num_blocks, 8)


async def test_attach_is_refused_where_not_one_sequence_has_room(
    loading_worker: Worker, recurrent: LoadedModel
) -> None:
    state_bytes = recurrent.model.state_spec.bytes_per_slot
    loading_worker.open(ModelRunner(recurrent, load_ops("reference"), KvCacheSize(2 * state_bytes)))
    with pytest.raises(grpc.aio.AioRpcError, match="beside the recurrent states of one sequence") as error:
        await loading_worker.stub.Attach(introduced(1, max_num_seqs=64))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_scheduler_that_knows_no_states_is_refused(loading_worker: Worker, recurrent: LoadedModel) -> None:
    loading_worker.open(ModelRunner(recurrent, load_ops("reference"), KvCacheSize(0, 64)))
    with pytest.raises(grpc.aio.AioRpcError, match="does not know this: recurrent_state"):
        await loading_worker.attach(1)
    assert (await loading_worker.stub.Attach(introduced(1))).num_checkpoint_slots == 16
