from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.process.exits import ExitCode
from tests.support.cells.worker_group import WorkerProcess, start_group
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_runner import generate_alone, load_exact
from tests.support.worker.worker_steps import (
    decode_step,
    heartbeat_request,
    make_enter,
    prefill_step,
    to_request,
    unpack,
)

pytestmark = pytest.mark.process

PROMPT = [5, 9, 2, 44, 17]
ATTACH = worker_pb2.AttachRequest(
    epoch=1, scheduler_instance_id="test", block_size=4, max_num_seqs=4, max_num_batched_tokens=64
)
DRAINABLE = worker_pb2.AttachRequest(drain_time={"seconds": 3600})
DRAINABLE.MergeFrom(ATTACH)
POISON = 333
POLL_S = 0.05


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        changes={"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6},
    )


def requests_of(num_decodes: int) -> Iterator[worker_pb2.StepRequest]:
    yield heartbeat_request()
    yield to_request(prefill_step(make_enter(0, PROMPT, list(range(16)))))
    for step_id in range(2, 2 + num_decodes):
        yield to_request(decode_step(step_id=step_id))


def generate(leader: WorkerProcess, num_tokens: int) -> list[int]:
    """Claim the group and decode."""
    with grpc.insecure_channel(leader.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        assert stub.Attach(ATTACH).num_blocks == 16
        results = stub.Execute(requests_of(num_tokens - 1))
        return [unpack(result.token_ids)[0] for result in results if not result.HasField("heartbeat")]


def test_a_group_generates_the_models_tokens_and_ends_cleanly_with_its_first_member(
    model_dir: Path, tmp_path: Path
) -> None:
    with start_group(model_dir, tmp_path, 2) as (leader, member):
        assert generate(leader, 6) == generate_alone(load_exact(model_dir), PROMPT, 6)
        member.process.send_signal(signal.SIGTERM)
        assert (member.wait(), leader.wait()) == (0, 0), leader.log() + member.log()
        assert "Traceback" not in leader.log() + member.log()


def second_attach() -> worker_pb2.AttachRequest:
    return worker_pb2.AttachRequest.FromString(
        ATTACH.SerializeToString() + worker_pb2.AttachRequest(epoch=2).SerializeToString()
    )


def test_heartbeats_continue_inside_a_collective_which_a_killed_member_ends(model_dir: Path, tmp_path: Path) -> None:
    with start_group(model_dir, tmp_path, 2) as (leader, member):
        with grpc.insecure_channel(leader.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stub.Attach(ATTACH)
            # The leader waits for it inside the step's first collective, and its absence has not been noticed yet.
            member.process.send_signal(signal.SIGSTOP)
            results = stub.Execute(requests_of(0))
            assert [next(results).HasField("heartbeat") for _ in range(3)] == [True] * 3
            member.process.kill()
            assert leader.wait() == ExitCode.LINK_LOST, leader.log()
            results.cancel()
        assert "the link to a follower is broken" in leader.log()
        assert "Traceback" not in leader.log()


def test_a_stopped_member_is_noticed_and_ends_its_whole_group(model_dir: Path, tmp_path: Path) -> None:
    with start_group(model_dir, tmp_path, 3, "--silence-s=2") as (leader, stopped, other):
        stopped.process.send_signal(signal.SIGSTOP)
        assert leader.wait() == ExitCode.LINK_LOST, leader.log()
        assert "the link to a follower is silent" in leader.log()
        assert other.wait() == ExitCode.LINK_LOST, other.log()
        stopped.process.send_signal(signal.SIGCONT)
        assert stopped.wait() == ExitCode.LINK_LOST, stopped.log()


def test_the_failpoint_token_ends_the_whole_group(model_dir: Path, tmp_path: Path) -> None:
    with start_group(model_dir, tmp_path, 2, f"--fail-on-token={POISON}") as (leader, member):
        assert len(generate(leader, 2)) == 2
        with grpc.insecure_channel(leader.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stub.Attach(second_attach())
            poison: Any = prefill_step(make_enter(0, [5, POISON], [0]))
            request = to_request(poison)
            request.epoch = 2
            with pytest.raises(grpc.RpcError):
                list(stub.Execute(iter([heartbeat_request(2), request])))
        codes = {leader.wait(), member.wait()}
    assert codes <= {ExitCode.FAILPOINT, ExitCode.LINK_LOST}
    assert ExitCode.FAILPOINT in codes


def test_a_held_group_is_drained_when_a_member_is_asked_to_end(model_dir: Path, tmp_path: Path) -> None:
    steps: queue.SimpleQueue[worker_pb2.StepRequest | None] = queue.SimpleQueue()
    with start_group(model_dir, tmp_path, 2) as (leader, member):
        with grpc.insecure_channel(leader.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stub.Attach(DRAINABLE)
            results = stub.Execute(iter(steps.get, None))
            first, *later = requests_of(2)
            steps.put(first)
            steps.put(later[0])
            while next(results).HasField("heartbeat"):
                pass
            member.process.send_signal(signal.SIGTERM)
            while not next(results).heartbeat.is_leaving:
                pass
            for step in later[1:]:
                steps.put(step)
            steps.put(None)
            assert [result.step_id for result in results if not result.HasField("heartbeat")] == [2, 3]
        assert (member.wait(), leader.wait()) == (0, 0), leader.log() + member.log()
        assert "Traceback" not in leader.log() + member.log()


def test_a_second_signal_ends_a_held_group_at_once(model_dir: Path, tmp_path: Path) -> None:
    steps: queue.SimpleQueue[worker_pb2.StepRequest | None] = queue.SimpleQueue()
    with start_group(model_dir, tmp_path, 2) as (leader, member), grpc.insecure_channel(leader.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stub.Attach(DRAINABLE)
        results = stub.Execute(iter(steps.get, None))
        for request in requests_of(0):
            steps.put(request)
        # A step's result says that the scheduler's heartbeat was read before it: the group is held.
        while next(results).HasField("heartbeat"):
            pass
        leader.process.send_signal(signal.SIGTERM)
        while not next(results).heartbeat.is_leaving:
            pass
        while "asked to end at once" not in leader.log():
            leader.process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
        assert (member.wait(), leader.wait()) == (0, 0), leader.log() + member.log()
        assert "Traceback" not in leader.log() + member.log()
        steps.put(None)
