from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from torch import Tensor

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.group.link import checksum
from services.worker.group.meeting import NotMetError
from services.worker.models.loader import LoadedModel
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.exits import ExitCode
from shared.errors import GroupMismatchError
from shared.network.rpc import make_channel, make_server
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.release import find_release
from shared.step.step import StepResult
from tests.support.worker.group_domain import Domain, wait_until_open
from tests.support.worker.worker_runner import WrappedModel, generate_alone, make_runner
from tests.support.worker.worker_steps import (
    column,
    decode_step,
    heartbeat_request,
    make_enter,
    prefill_step,
    to_request,
    unpack,
)

PROMPT = [5, 9, 2, 44, 17]
ATTACH = worker_pb2.AttachRequest(
    epoch=1, scheduler_instance_id="test", block_size=4, max_num_seqs=8, max_num_batched_tokens=256
)
# Fields serialized later win.
SECOND_ATTACH = ATTACH.SerializeToString() + worker_pb2.AttachRequest(epoch=2).SerializeToString()


@pytest.fixture
async def domain(device: DeviceLoop, loaded: LoadedModel, tmp_path: Path) -> AsyncIterator[Domain]:
    async with contextlib.AsyncExitStack() as stack:
        yield Domain(device, loaded, tmp_path, stack)


async def execute(stub: Any, *steps: Any) -> Any:
    """An Execute stream that has identified its scheduler, with the steps sent on it."""
    call = stub.Execute()
    await call.write(heartbeat_request())
    for step in steps:
        await call.write(to_request(step))
    return call


async def read_result(call: Any) -> worker_pb2.StepResult:
    while (result := await call.read()).HasField("heartbeat"):
        pass
    assert isinstance(result, worker_pb2.StepResult)
    return result


async def read_relayed(call: Any) -> worker_pb2.JoinResponse:
    while (response := await call.read()).HasField("heartbeat"):
        pass
    assert isinstance(response, worker_pb2.JoinResponse)
    return response


def prefill(step_id: int = 1) -> Any:
    return prefill_step(make_enter(0, PROMPT, list(range(6))), step_id=step_id)


async def refusal_of(call: Any) -> str | None:
    """The reason with which a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as error_info:
        await call
    return reason_of(status_from_rpc_error(error_info.value))


async def test_a_group_computes_each_step_on_all_its_ranks(domain: Domain, loaded: LoadedModel) -> None:
    stub, _, _ = await domain.start_group()
    attached = await stub.Attach(ATTACH)
    assert attached.layout == worker_pb2.RankLayout(dp_size=1, tp_size=2)
    call = await execute(stub, prefill(), *(decode_step(step_id=step_id) for step_id in range(2, 6)))
    results = [await read_result(call) for _ in range(5)]
    assert [unpack(result.token_ids)[0] for result in results] == generate_alone(loaded, PROMPT, 5)


async def test_a_group_has_as_many_kv_blocks_as_its_smallest_rank(domain: Domain) -> None:
    stub, _, _ = await domain.start_group(num_member_blocks=40)
    assert (await stub.Attach(ATTACH)).num_blocks == 40


async def test_a_group_can_be_claimed_once_its_members_have_joined(domain: Domain) -> None:
    leader = await domain.start()
    async with make_channel(leader.address, internal=True) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        assert await refusal_of(stub.Attach(ATTACH)) == "NOT_READY"
        await wait_until_open(await domain.start_member(), leader)
        await stub.Attach(ATTACH)


class SlowRefusal(worker_pb2_grpc.GroupServiceServicer):
    """A leader that refuses some time after sending the headers."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register this servicer."""
        worker_pb2_grpc.add_GroupServiceServicer_to_server(self, server)

    async def Meet(self, request: worker_pb2.MeetRequest, context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        await context.write(worker_pb2.MeetResponse(domain_start_id="one", store="127.0.0.1:9"))
        await asyncio.Event().wait()

    async def Join(self, requests: AsyncIterator[worker_pb2.JoinRequest], context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        await anext(aiter(requests))
        await context.send_initial_metadata(())
        await asyncio.sleep(0.1)
        raise GroupMismatchError("no place for this process")


async def test_a_refusal_after_the_headers_is_still_a_refusal(domain: Domain) -> None:
    address = f"unix:{domain.directory / 'refusing.sock'}"
    server = make_server(address, [SlowRefusal()], internal=True)
    await server.start()
    domain.stack.push_async_callback(server.stop, 0)
    member = await domain.start("--tp-rank=1", "--tp-size=2", f"--leader={address}")
    code, fields = await member.ended.get()
    assert (code, fields["error"]) == (ExitCode.REFUSED, "no place for this process")
    assert member.opening is not None
    assert not member.opening.done()


async def test_a_member_says_that_its_leader_cannot_be_reached_and_joins_it_later(
    domain: Domain, caplog: pytest.LogCaptureFixture
) -> None:
    member = await domain.start("--tp-rank=1", "--tp-size=2", f"--leader=unix:{domain.directory / '1.sock'}")
    while not any("cannot meet the leader" in record.message for record in caplog.records):  # noqa: ASYNC110 - a log has no event
        await asyncio.sleep(0)
    await wait_until_open(member, await domain.start())


@pytest.mark.parametrize(
    "changes",
    [
        {"domain_start_id": "second"},
        {"model_digest": "another"},
        {"layout": worker_pb2.RankLayout(dp_size=1, tp_rank=2, tp_size=3)},
        {"layout": worker_pb2.RankLayout(dp_size=1, tp_rank=0, tp_size=2)},
        {"layout": worker_pb2.RankLayout(dp_size=2, tp_rank=1, tp_size=2, has_expert_parallel=True)},
        {"release": "0.0.1"},
    ],
)
async def test_a_process_that_does_not_belong_to_the_domain_is_refused(domain: Domain, changes: dict[str, Any]) -> None:
    leader = await domain.start()
    call = await domain.join_by_hand(**changes)
    assert await refusal_of(call.read()) == "GROUP_MISMATCH"
    assert leader.ended.empty()


async def test_a_leader_answers_before_its_weights_load(domain: Domain) -> None:
    leader = await domain.start_empty()
    meeting = await domain.meet_by_hand()
    rendezvous = await leader.role.meet()
    answer = await meeting.read()
    assert rendezvous is not None
    assert (answer.domain_start_id, answer.store) == (rendezvous.start_id, rendezvous.store)


async def test_a_coupled_leader_passes_on_what_the_first_told_it(domain: Domain) -> None:
    layout = ("--dp-size=2", "--tp-size=2", "--ep")
    first = await domain.start_empty(*layout, "--dp-rank=0")
    second = await domain.start_empty(*layout, "--dp-rank=1", f"--leader={first.address}")
    member = await domain.start_empty(*layout, "--dp-rank=1", "--tp-rank=1", f"--leader={second.address}")
    asking = [asyncio.create_task(process.role.meet()) for process in (member, second)]
    told = await first.role.meet()
    assert told is not None
    assert {(answer.start_id, answer.store) for answer in await asyncio.gather(*asking) if answer} == {
        (told.start_id, told.store)
    }


@pytest.mark.parametrize("by", ["meet_by_hand", "join_by_hand"])
async def test_a_process_of_another_release_is_told_both(domain: Domain, by: str) -> None:
    leader = await domain.start()
    call = await getattr(domain, by)(release="0.0.1")
    with pytest.raises(grpc.aio.AioRpcError) as error_info:
        await call.read()
    assert error_info.value.details() == f"the process is of release 0.0.1, its leader of {find_release()}"
    assert leader.ended.empty()


@pytest.mark.parametrize(
    "changes", [{}, {"layout": worker_pb2.RankLayout(dp_size=1, tp_rank=2, tp_size=3)}], ids=["taken", "unknown"]
)
async def test_a_process_without_a_place_is_not_told_where_to_meet(domain: Domain, changes: dict[str, Any]) -> None:
    leader = await domain.start()
    first = await domain.meet_by_hand()
    assert await first.read() is not None
    call = await domain.meet_by_hand(**changes)
    assert await refusal_of(call.read()) == "GROUP_MISMATCH"
    assert leader.ended.empty()


async def test_a_follower_that_is_lost_while_it_loads_ends_its_leader(domain: Domain) -> None:
    leader = await domain.start()
    meeting = await domain.meet_by_hand()
    await meeting.read()
    meeting.cancel()
    code, fields = await leader.ended.get()
    assert (code, fields["partner"].tp_rank) == (ExitCode.LINK_LOST, 1)


async def test_a_leader_that_is_lost_while_a_follower_loads_ends_it(domain: Domain) -> None:
    leader = await domain.start()
    member = await domain.start_empty("--tp-rank=1", "--tp-size=2", f"--leader={leader.address}")
    await member.role.meet()
    assert leader.server is not None
    await leader.server.stop(0)
    code, _ = await member.ended.get()
    assert code is ExitCode.LINK_LOST


async def test_a_leader_that_does_not_answer_in_time_is_named(domain: Domain) -> None:
    leader = f"unix:{domain.directory / 'none.sock'}"
    member = await domain.start_empty("--tp-rank=1", "--tp-size=2", f"--leader={leader}", "--meet-timeout-s=0.5")
    with pytest.raises(NotMetError, match=f"cannot meet the leader {leader} within 0.5 s: .*[Cc]onnect"):
        await member.role.meet()


async def test_a_leader_that_cannot_tell_in_time_is_named(domain: Domain) -> None:
    leader = await domain.start_empty()
    flags = ("--tp-rank=1", "--tp-size=2", f"--leader={leader.address}", "--meet-timeout-s=0.5")
    member = await domain.start_empty(*flags)
    with pytest.raises(NotMetError, match=r"within 0.5 s: it does not answer"):
        await member.role.meet()


async def test_an_address_that_does_not_become_usable_is_named(domain: Domain) -> None:
    leader = await domain.start_empty("--tp-size=2", "--collective-host=192.0.2.1", "--meet-timeout-s=0.5")
    with pytest.raises(NotMetError, match=r"cannot listen for collectives on 192.0.2.1 within 0.5 s: .*assign"):
        await leader.role.meet()


async def test_a_place_can_be_taken_only_once(domain: Domain) -> None:
    await domain.start_group()
    call = await domain.join_by_hand()
    assert await refusal_of(call.read()) == "GROUP_MISMATCH"


async def test_steps_reach_a_member_unchanged_and_a_result_waits_for_its_answer(
    domain: Domain, loaded: LoadedModel
) -> None:
    leader = await domain.start()
    member = await domain.join_by_hand()
    await wait_until_open(leader)
    async with make_channel(leader.address, internal=True) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        attach = asyncio.ensure_future(stub.Attach(ATTACH))
        assert (await read_relayed(member)).attach == ATTACH
        await member.write(attached_as(1))
        attached = await attach
        assert attached.num_blocks == 8
        # The group's fingerprint differs from its leader's alone.
        assert attached.numerics_fingerprint not in ("other", make_runner(loaded).numerics_fingerprint)
        steps = [prefill(), decode_step(step_id=2)]
        call = await execute(stub, *steps)
        relayed = [worker_pb2.StepRequest.FromString((await read_relayed(member)).step) for _ in steps]
        assert relayed == [to_request(step) for step in steps]
        result = asyncio.ensure_future(read_result(call))
        # The member's heartbeats continue, without a result.
        await member.write(worker_pb2.JoinRequest(heartbeat=worker_pb2.Heartbeat()))
        await member.read()
        assert not result.done()
        await member.write(done(1, generate_alone(loaded, PROMPT, 1)))
        assert unpack((await result).token_ids) == generate_alone(loaded, PROMPT, 1)


def attached_as(epoch: int) -> worker_pb2.JoinRequest:
    """A member's answer to an epoch."""
    return worker_pb2.JoinRequest(attached=worker_pb2.MemberAttached(epoch=epoch, num_blocks=8))


def done(step_id: int, tokens: list[int]) -> worker_pb2.JoinRequest:
    """A member's answer to a step of epoch 1."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return worker_pb2.JoinRequest(done=worker_pb2.Done(epoch=1, step_id=step_id, checksum=zlib.crc32(data)))


@pytest.mark.parametrize("differing", [1, 2])
async def test_ranks_that_draw_different_tokens_end_the_domain(
    domain: Domain, loaded: LoadedModel, differing: int
) -> None:
    leader = await domain.start("--tp-size=3")
    layouts = [worker_pb2.RankLayout(dp_size=1, tp_rank=rank, tp_size=3) for rank in (1, 2)]
    members = [await domain.join_by_hand(layout=layout) for layout in layouts]
    await wait_until_open(leader)
    async with make_channel(leader.address, internal=True) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for member in members:
            await member.write(attached_as(1))
        await stub.Attach(ATTACH)
        call = await execute(stub, prefill())
        token = generate_alone(loaded, PROMPT, 1)[0]
        for rank, member in enumerate(members, start=1):
            await member.write(done(1, [token ^ 1 if rank == differing else token]))
        with pytest.raises(grpc.aio.AioRpcError):
            await read_result(call)
    code, fields = await leader.ended.get()
    assert code is ExitCode.RANKS_DIFFER
    assert fields["own_checksum"] == zlib.crc32(token.to_bytes(4, "little"))
    assert fields["tp_rank"] == differing
    assert fields["checksum"] == zlib.crc32((token ^ 1).to_bytes(4, "little"))


def checksum_without_counts(result: StepResult) -> int:
    return checksum(replace(result, counts=None))


async def answer_despite_other_counts(
    domain: Domain, loaded: LoadedModel, checksum_of: Callable[[StepResult], int] = checksum
) -> Any:
    """A leader's answer to a step of which its member has the same token, but says that drafts were checked."""
    await domain.start()
    member = await domain.join_by_hand()
    await wait_until_open(domain.processes[0])
    stub = await domain.stub()
    await member.write(attached_as(1))
    await stub.Attach(ATTACH)
    call = await execute(stub, prefill())
    tokens = column(generate_alone(loaded, PROMPT, 1))
    result = StepResult(epoch=1, step_id=1, token_ids=tokens, not_finite_rows=column(), counts=column([1]))
    theirs = worker_pb2.Done(epoch=1, step_id=1, checksum=checksum_of(result))
    await member.write(worker_pb2.JoinRequest(done=theirs))
    return await read_result(call)


async def test_ranks_that_accept_different_drafts_end_the_domain(domain: Domain, loaded: LoadedModel) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await answer_despite_other_counts(domain, loaded)
    code, _ = await domain.processes[0].ended.get()
    assert code is ExitCode.RANKS_DIFFER


async def test_a_checksum_without_counts_is_seen_in_an_answer(
    domain: Domain, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.group.group_servicer.checksum", checksum_without_counts)
    answer = await answer_despite_other_counts(domain, loaded, checksum_without_counts)
    assert unpack(answer.token_ids) == generate_alone(loaded, PROMPT, 1)


class CountingModel(WrappedModel):
    """Counts its forward passes."""

    num_passes = 0

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.num_passes += 1
        return super().forward(token_ids, positions)


async def test_relayed_steps_are_computed_before_an_attach_is_answered(
    domain: Domain, device: DeviceLoop, loaded: LoadedModel
) -> None:
    model = CountingModel(loaded.model)
    domain.loaded = replace(loaded, model=model)
    leader = await domain.start()
    member = await domain.join_by_hand()
    await wait_until_open(leader)
    async with make_channel(leader.address, internal=True) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await member.write(attached_as(1))
        await stub.Attach(ATTACH)
        assert (await read_relayed(member)).HasField("attach")
        release = threading.Event()
        device.submit(release.wait)
        call = await execute(stub, prefill(), decode_step(step_id=2))
        assert [(await read_relayed(member)).WhichOneof("message") for _ in range(2)] == ["step", "step"]
        # The member may have begun them, and would wait for its leader in a collective.
        attach = asyncio.ensure_future(stub.Attach(worker_pb2.AttachRequest.FromString(SECOND_ATTACH)))
        assert (await read_relayed(member)).attach.epoch == 2
        await member.write(attached_as(2))
        release.set()
        attached = await attach
    assert (attached.last_step_epoch, attached.last_step_id) == (1, 2)
    assert model.num_passes == 2
    call.cancel()


@pytest.mark.parametrize("is_leader", [False, True], ids=["member", "leader"])
async def test_a_process_that_was_asked_to_end_ends_its_group_without_a_failure(
    domain: Domain, device: DeviceLoop, is_leader: bool
) -> None:
    _, leader, member = await domain.start_group()
    asked, partner = (leader, member) if is_leader else (member, leader)
    asked.end.stopping.set()
    await partner.end.stopping.wait()
    assert device.is_stopping
    assert partner.ended.empty()


async def test_a_broken_link_ends_the_leader(domain: Domain) -> None:
    leader = await domain.start()
    member = await domain.join_by_hand()
    await wait_until_open(leader)
    member.cancel()
    code, fields = await leader.ended.get()
    assert (code, fields["partner"].tp_rank) == (ExitCode.LINK_LOST, 1)


async def test_a_silent_partner_ends_the_leader(domain: Domain) -> None:
    domain.silence_s = 1.0
    leader = await domain.start()
    await domain.join_by_hand()
    await wait_until_open(leader)
    code, _ = await leader.ended.get()
    assert code is ExitCode.LINK_LOST


async def test_a_failing_step_ends_all_processes_of_a_group(domain: Domain, caplog: pytest.LogCaptureFixture) -> None:
    stub, leader, member = await domain.start_group()
    await stub.Attach(ATTACH)
    # The batch contains no sequence to which a block could be appended.
    call = await execute(stub, decode_step(append=[(3, 9)]))
    with caplog.at_level(logging.WARNING):
        codes = [(await process.ended.get())[0] for process in (leader, member)]
    assert codes == [ExitCode.STEP_FAILED] * 2
    assert "step refused" in caplog.text
    call.cancel()


async def test_leaders_of_coupled_groups_follow_the_first_and_get_no_steps_from_it(domain: Domain) -> None:
    domain.leader_flags = ("--dp-rank=0", "--dp-size=2", "--ep")
    first = await domain.start()
    second = await domain.start("--dp-rank=1", "--dp-size=2", "--ep", f"--leader={domain.leader_address}")
    await wait_until_open(first, second)
    for process, dp_rank in ((first, 0), (second, 1)):
        async with make_channel(process.address, internal=True) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            attached = await stub.Attach(ATTACH)
            assert attached.layout == worker_pb2.RankLayout(
                dp_rank=dp_rank, dp_size=2, tp_size=1, has_expert_parallel=True
            )
            call = await execute(stub, prefill())
            assert len(unpack((await read_result(call)).token_ids)) == 1
    first.end.stopping.set()
    await second.end.stopping.wait()


async def read_leaving(call: Any) -> None:
    """Read until the group says that it is leaving."""
    while not (await call.read()).heartbeat.is_leaving:
        pass


@pytest.mark.parametrize("asked", [0, 1], ids=["leader", "member"])
async def test_a_group_leaves_whichever_of_its_processes_was_asked_to_end(domain: Domain, asked: int) -> None:
    stub, *processes = await domain.start_group()
    attach = worker_pb2.AttachRequest(drain_time=duration_pb2.Duration(seconds=60))
    attach.MergeFrom(ATTACH)
    await stub.Attach(attach)
    call = await execute(stub, prefill_step(make_enter(0, PROMPT, list(range(16)))))
    await read_result(call)
    processes[asked].end.leave("asked to end")
    leader = processes[0]
    await leader.end.leaving.wait()
    # As the RPC thread does.
    leader.role.leave()
    await read_leaving(call)
    for process in processes:
        await process.end.leaving.wait()
        assert not process.end.stopping.is_set()


async def test_the_leaders_of_coupled_groups_leave_together(domain: Domain) -> None:
    layout = ("--dp-size=2", "--ep")
    first = await domain.start("--dp-rank=0", *layout)
    second = await domain.start(*layout, "--dp-rank=1", f"--leader={domain.leader_address}")
    await wait_until_open(first, second)
    second.end.leave("asked to end")
    await first.end.leaving.wait()
