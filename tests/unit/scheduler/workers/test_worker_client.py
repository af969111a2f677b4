"""The connections of the link to a group."""

from __future__ import annotations

from pathlib import Path

import grpc

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.domains.attach_events import AttachEvent, Refused
from services.scheduler.workers.worker_client import GroupLink
from shared.ids import DpRank
from shared.network.rpc import make_channel


async def test_an_offer_that_was_not_delivered_is_repeated_over_a_new_connection(tmp_path: Path) -> None:
    channels: list[grpc.aio.Channel] = []
    events: list[AttachEvent] = []

    def connect() -> grpc.aio.Channel:
        channels.append(make_channel(f"unix:{tmp_path}/none", internal=True))
        return channels[-1]

    link = GroupLink(
        DpRank(0), connect, worker_pb2.AttachRequest(), on_attach_event=events.append, on_event=lambda _: None
    )
    for epoch in (1, 2):
        await link.offer(epoch)
    assert [event.epoch for event in events if isinstance(event, Refused)] == [1, 2]
    assert len(channels) == 2
