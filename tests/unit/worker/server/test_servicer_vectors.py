"""Attaching to a worker whose model is served for vectors."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch

from lockstep.internal.v1 import worker_pb2
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from shared.wire import introduce_self
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_service import Worker, attach_request


async def test_a_scheduler_that_would_ask_for_completions_is_refused(loading_worker: Worker, tmp_path: Path) -> None:
    ops, options = load_ops("reference"), LoadOptions(task="embed")
    directory = write_tiny_llama(tmp_path / "model", changes={"num_hidden_layers": 1})
    loaded = load_model(directory, ops, torch.float32, lambda _: None, options=options)
    loading_worker.open(ModelRunner(loaded, ops, KvCacheSize(0, 64)))
    with pytest.raises(grpc.aio.AioRpcError, match="does not know this: vectors"):
        await loading_worker.attach(1)
    request = attach_request(1)
    request.MergeFrom(worker_pb2.AttachRequest(introduction=introduce_self().encode()))
    assert (await loading_worker.stub.Attach(request)).task == "embed"
